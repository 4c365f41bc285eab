from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polyport import ExportConfig, ExportedModel
from polyport.errors import (
    BackendContractError,
    BackendLoadError,
    ConfigError,
    IncompatibleVersion,
    InputError,
)
from polyport.markers import hookimpl
from polyport.metadata import ExportMetadata
from polyport.patching import Patch
from polyport.pipeline import ExportedComponent, RunRequest
from polyport.session import Session, backend_class

Install = Callable[..., Path]

#: A plugin from a template: what each test changes is one line of it.
SOURCE = """
from typing import ClassVar
import attrs
from polyport import ExportConfig
from polyport.markers import hookimpl
from polyport.pipeline import BackendInfo

@attrs.frozen(kw_only=True)
class {title}Config(ExportConfig):
    export_format: ClassVar[str] = "{config_format}"

@hookimpl
def polyport_backend():
    return BackendInfo(format="{format}", config_class={title}Config, exporter="{title}Exporter", suffix=".x",
                       summary="", builds_on={builds_on}, packages={packages})
{more}
"""

HOOKS = """
@hookimpl
def polyport_trace(call, config): return "{name} traces"
@hookimpl
def polyport_lower(traced, config): return None
@hookimpl
def polyport_save(components, directory): return None
@hookimpl
def polyport_load(files, metadata, trust): return "{name} loads"
@hookimpl
def polyport_run(component, request): return None
"""


@pytest.fixture
def backend(install: Install) -> Callable[..., str]:
    """Install a backend that says of itself what the test wants."""

    def make(name: str = "toy", **changes: Any) -> str:
        values = {
            "format": name,
            "config_format": name,
            "title": name.title(),
            "builds_on": "()",
            "packages": "{}",
            "more": HOOKS.format(name=name),
            **changes,
        }
        module = f"polyport_{name}_x"
        install(
            f"polyport-{name}",
            entry_points={"polyport.backends": {name: module}},
            modules={module: SOURCE.format(**values)},
        )
        return name

    return make


def test_backend_is_asked_before_its_base_and_core(backend: Callable[..., str]) -> None:
    backend("base")
    more = "@hookimpl\ndef polyport_load(files, metadata, trust): return 'top loads'\n"
    session = Session(backend("top", builds_on="('base',)", more=more))
    assert session.load("model", [], ExportMetadata(), False) == "top loads"
    # what the backend doesn't implement comes from what it builds on
    assert session._manager.hook.polyport_trace(call=None, config=None) == "base traces"
    assert session.backend.format == "top"
    assert session.hooks() == ("polyport_backend", "polyport_load")


def test_two_that_build_on_the_same(backend: Callable[..., str]) -> None:
    backend("base")
    backend("middle", builds_on="('base',)")
    session = Session(backend("top", builds_on="('middle', 'base')", more=""))
    assert session.load("model", [], ExportMetadata(), False) == "middle loads"


def test_circle(backend: Callable[..., str]) -> None:
    backend("one", builds_on="('two',)")
    backend("two", builds_on="('one',)")
    with pytest.raises(BackendContractError, match="one -> two -> one build on each other in a circle"):
        Session("one")


def test_base_that_is_missing(backend: Callable[..., str]) -> None:
    with pytest.raises(ImportError, match="No installed plugin provides the format 'ghost'"):
        Session(backend(builds_on="('ghost',)"))


def test_formats_must_agree(backend: Callable[..., str]) -> None:
    backend("one", format="uno")
    with pytest.raises(
        BackendContractError, match=r"polyport-one 1\.0: .*'one', polyport_backend says 'uno'"
    ):
        Session("one")
    backend("two", config_format="dos")
    with pytest.raises(BackendContractError, match=r"its config 'dos'\. The three must agree"):
        Session("two")


@pytest.mark.parametrize(
    "more",
    [
        "polyport_backend = None",
        "def polyport_backend(): return None",
        "def polyport_backend(): return {'format': 'toy'}",
        "def polyport_backend(): raise RuntimeError('no')",
        "ToyConfig = dict",
        "ToyConfig = None",
    ],
)
def test_no_description_of_itself(backend: Callable[..., str], more: str) -> None:
    with pytest.raises(BackendContractError, match=r"polyport-toy 1\.0: "):
        Session(backend(more=HOOKS + more))


def test_packages_are_checked(backend: Callable[..., str], install: Install) -> None:
    install("a-runtime", version="1.0+cpu")
    Session(backend("fine", packages="{'a-runtime': '==1.0'}"))
    with pytest.raises(
        IncompatibleVersion, match=r"polyport-toy 1\.0 can't be used: a-runtime>=2 is needed, 1\.0\+cpu"
    ):
        Session(backend(packages="{'a-runtime': '>=2'}"))


def test_hooks_that_are_missing(backend: Callable[..., str]) -> None:
    with pytest.raises(
        BackendContractError,
        match="implements no polyport_trace, polyport_lower, polyport_save, polyport_load, polyport_",
    ):
        Session(backend(more=""))


@pytest.mark.parametrize(
    "more",
    [
        "@hookimpl\ndef polyport_lowr(traced, config): pass",
        "@hookimpl\ndef polyport_lower(traced, options): pass",
    ],
    ids=["misspelt hook", "misspelt argument"],
)
def test_hooks_that_do_not_fit(backend: Callable[..., str], more: str) -> None:
    with pytest.raises(BackendContractError, match=r"hooks of polyport-toy 1\.0 don't fit"):
        Session(backend(more=HOOKS + more))


def test_a_broken_plugin_hurts_nobody_else(backend: Callable[..., str], install: Install) -> None:
    install(
        "polyport-broken",
        entry_points={"polyport.backends": {"broken": "broken_x"}},
        modules={"broken_x": "1 / 0"},
    )
    Session(backend())
    with pytest.raises(BackendLoadError, match=r"polyport-broken 1\.0.*ZeroDivisionError"):
        Session("broken")


# ── what hooks return ───────────────────────────────────────────────────────────────────────────────────────────────


def _session(backend: Callable[..., str], **hooks: Any) -> Session:
    plugin = type("Extra", (), {name: staticmethod(hookimpl(hook)) for name, hook in hooks.items()})()
    return Session(backend(), [plugin])


@pytest.mark.parametrize("value", ["text", 7, {}, object()])
def test_wrong_return_types(backend: Callable[..., str], value: Any) -> None:
    session = _session(
        backend,
        polyport_capture=lambda model, inputs, config: value,
        polyport_trace=lambda call, config: value,
        polyport_lower=lambda traced, config: value,
        polyport_run=lambda component, request: value,
    )
    component = ExportedComponent(program=None, metadata=ExportMetadata())
    calls: dict[str, Callable[[], Any]] = {
        "polyport_capture": lambda: session.capture(None, {}, ExportConfig()),
        "polyport_trace": lambda: session.trace(None, ExportConfig()),  # type: ignore[arg-type]
        "polyport_lower": lambda: session.lower(None, ExportConfig()),  # type: ignore[arg-type]
        "polyport_run": lambda: session.run(component, RunRequest()),
    }
    for hook, call in calls.items():
        with pytest.raises(
            BackendContractError, match=rf"{hook} of (the )?backend 'toy' returned {type(value).__name__}"
        ):
            call()


def test_nobody_answers(backend: Callable[..., str]) -> None:
    session = Session(backend())
    with pytest.raises(BackendContractError, match="polyport_lower of the backend 'toy' returned NoneType"):
        session.lower(None, ExportConfig())  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [7, ["text"], [None]])
def test_patches_that_are_none(backend: Callable[..., str], value: Any) -> None:
    session = _session(backend, polyport_patch=lambda stage, config: value)
    with pytest.raises(BackendContractError, match="polyport_patch of the backend 'toy'"):
        session.patches("trace", ExportConfig())


@pytest.mark.parametrize("value", [None, ["model"], {}, {"model": []}, {"other": ["a.x"]}])
def test_files_that_are_none(backend: Callable[..., str], tmp_path: Path, value: Any) -> None:
    session = _session(backend, polyport_save=lambda components, directory: value)
    component = ExportedComponent(program=None, metadata=ExportMetadata())
    with pytest.raises(BackendContractError, match="polyport_save"):
        session.save({"model": component}, tmp_path)


def test_patches_of_all_plugins_each_once(backend: Callable[..., str]) -> None:
    def patch(name: str, reason: str) -> Patch:
        return Patch(id=name, targets=(), reason=reason, upstream="u", affects={}, reproduce=lambda: None)

    base = (
        "@hookimpl\ndef polyport_patch(stage, config): return config.quantizer if stage == 'trace' else ()\n"
    )
    session = Session(
        backend(more=HOOKS + base),
        [
            type(
                "Extra",
                (),
                {
                    "polyport_patch": staticmethod(
                        hookimpl(lambda stage: [patch("a", "newer"), patch("c", "")])
                    )
                },
            )()
        ],
    )
    config = ExportConfig(quantizer=[patch("a", "older"), patch("b", "")])
    assert [(p.id, p.reason) for p in session.patches("trace", config)] == [
        ("a", "newer"),
        ("b", ""),
        ("c", ""),
    ]


def test_default_quantizing_hands_over_to_the_config(backend: Callable[..., str]) -> None:
    class Quantizer:
        def quantize(self, target: Any, config: ExportConfig, stage: str) -> Any:
            return f"{target} at {stage}"

    session = Session(backend())
    assert session.quantize("it", ExportConfig(), "graph") == "it"
    assert session.quantize("it", ExportConfig(quantizer=Quantizer()), "graph") == "it at graph"
    with pytest.raises(ConfigError, match="`quantizer` is int, which has no `quantize` method"):
        session.quantize("it", ExportConfig(quantizer=3), "graph")


def test_runner_options(make_export: Callable[..., ExportedModel]) -> None:
    x = torch.ones(1, 3)
    assert make_export().to("cpu", threads=2)(x=x)["y"].sum() == 6
    with pytest.raises(InputError, match=r"no runner option 'treads'\. Valid options: threads"):
        make_export().to("cpu", treads=2)(x=x)


# ── extensions ──────────────────────────────────────────────────────────────────────────────────────────────────────

WRAPPER = """
from polyport.markers import hookimpl

@hookimpl(wrapper=True)
def polyport_load(files, metadata, trust):
    files.append("{name} in")
    result = yield
    files.append("{name} out")
    return result + ", through {name}"
"""


def _extension(install: Install, name: str, source: str = WRAPPER, distribution: str | None = None) -> None:
    module = f"ext_{name}_{(distribution or 'x').replace('-', '_')}"
    install(
        distribution or f"ext-{name}",
        entry_points={"polyport.extensions": {name: module}},
        modules={module: source.format(name=name)},
    )


def test_wrappers_nest_in_order_of_their_names(backend: Callable[..., str], install: Install) -> None:
    for name in ("beta", "alpha"):
        _extension(install, name)
    steps: list[Any] = []
    loaded = Session(backend()).load("model", steps, ExportMetadata(), False)
    assert loaded == "toy loads, through alpha, through beta"
    assert steps == ["beta in", "alpha in", "alpha out", "beta out"]


def test_callers_plugins_go_outermost(backend: Callable[..., str], install: Install) -> None:
    _extension(install, "alpha")

    class Mine:
        @hookimpl(wrapper=True)
        def polyport_load(self) -> Any:
            result = yield
            return f"({result}), mine"

    session = Session(backend(), [Mine()])
    assert session.load("model", [], ExportMetadata(), False) == "(toy loads, through alpha), mine"


def test_extensions_may_share_names(backend: Callable[..., str], install: Install) -> None:
    """With each other, with a backend, with core: names of entry points are no namespace."""
    _extension(install, "toy")
    _extension(install, "polyport")
    _extension(install, "same", distribution="dist-one")
    _extension(install, "same", distribution="dist-two")
    assert Session(backend()).load("model", [], ExportMetadata(), False).count("through") == 4


def test_broken_extension_is_named(backend: Callable[..., str], install: Install) -> None:
    _extension(
        install, "alpha", "from polyport.markers import hookimpl\n@hookimpl\ndef polyport_oops(): pass\n"
    )
    with pytest.raises(BackendContractError, match=r"hooks of ext-alpha 1\.0 don't fit"):
        Session(backend())


# ── classes by name ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_classes_come_from_the_plugins_package(fake_backend: str) -> None:
    found = backend_class("FakeExporter")
    assert found is not None
    assert (found.__module__, found.__name__) == ("polyport_fake", "FakeExporter")
    assert backend_class("FakeConfig") is not None
    assert backend_class("TofuExporter") is None


def test_class_that_the_package_lacks(backend: Callable[..., str]) -> None:
    with pytest.raises(BackendContractError, match=r"polyport-toy 1\.0 names the class 'ToyExporter'"):
        Session(backend()).exporter()
