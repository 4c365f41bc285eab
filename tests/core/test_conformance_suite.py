"""The conformance suite passes for a right backend, and each of its tests fails for a backend that is wrong there."""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from polyport.session import Session
from polyport.testing import BackendConformance
from polyport.testing.workbench import Workbench

EAGER = Path(__file__).parent / "eager" / "polyport_eager.py"

#: What an installed distribution says of itself.
METADATA = """\
Metadata-Version: 2.1
Name: polyport-eager
Version: 1.0
Requires-Dist: polyport>=0.1,<1
Requires-Dist: torch>=2.9
"""

SUITE = """\
import pytest
from polyport.testing import BackendConformance

class TestConformance(BackendConformance):
    format = "eager"
    tolerances = {"float32": (1e-5, 1e-5), "float64": (1e-9, 1e-9)}
"""

Change = Callable[[str], str]


def replaced(*pairs: str) -> Change:
    """A change of source code: each text (which must be there) and what takes its place."""

    def change(source: str) -> str:
        for old, new in zip(pairs[::2], pairs[1::2], strict=True):
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        return source

    return change


def added(code: str) -> Change:
    return lambda source: f"{source}\n\n{code}\n"


def install(folder: Path, change: Change = str, metadata: str = METADATA) -> None:
    """Put a changed copy of the eager backend into a folder, as if it were installed there."""
    (folder / "polyport_eager.py").write_text(change(EAGER.read_text()))
    dist = folder / "polyport_eager-1.0.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text(metadata)
    (dist / "entry_points.txt").write_text("[polyport.backends]\neager = polyport_eager\n")


def run_suite(folder: Path, suite: str = SUITE, *options: str) -> str:
    """Run a suite on the backend installed in a folder, in a process of its own; returns what pytest prints."""
    (folder / "test_suite.py").write_text(suite)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_suite.py", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_right_backend_passes(tmp_path: Path) -> None:
    install(tmp_path)
    output = run_suite(tmp_path)
    summary = output.strip().splitlines()[-1]
    assert " passed" in summary, output
    assert not any(word in summary for word in ("failed", "error", "skipped")), output


class Suite(BackendConformance):
    format = "eager"
    tolerances: ClassVar = {"float32": (1e-5, 1e-5)}
    examples = ("encoder",)


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Runs one test of the suite on a changed eager backend, in this process."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        torch.nn.functional, "gelu", torch.nn.functional.gelu
    )  # some backends below change it

    def check(test: str, change: Change = str, metadata: str = METADATA, suite: type[Suite] = Suite) -> None:
        install(tmp_path, change, metadata)
        importlib.invalidate_caches()
        workbench = Workbench(suite, tmp_path)
        values: dict[str, Any] = {
            "workbench": workbench,
            "example": "encoder",
            "tmp_path": tmp_path / "given",
            "attack": "garbage for a program, signed",
            "precision": "float64",
        }
        values["tmp_path"].mkdir()
        function = getattr(suite, test)
        wanted = inspect.signature(function).parameters
        if "session" in wanted:
            values["session"] = Session("eager")
        if "copy" in wanted:
            values["copy"] = Path(shutil.copytree(workbench.saved("encoder"), tmp_path / "around" / "copy"))
        function(suite(), **{name: values[name] for name in wanted if name != "self"})

    yield check
    sys.modules.pop("polyport_eager", None)
    torch.set_grad_enabled(True)


WRONG: dict[str, tuple[Change, str]] = {
    "wrong numbers": (
        replaced("return list(output.values())", "return [x * 1.01 for x in output.values()]"),
        "test_export_computes_what_the_model_computes",
    ),
    "a frozen axis": (
        replaced("call.axes.get(name, {}).get(axis, size)", "size"),
        "test_dynamic_axes_have_names",
    ),
    "a forgotten mask": (
        replaced(
            "output = tensor_leaves(self.model(**kwargs, **self.constants))",
            "output = tensor_leaves(self.model(kwargs['input_ids'], **self.constants))",
        ),
        "test_export_computes_what_the_model_computes",
    ),
    "a cache that stays empty": (
        replaced(
            "return list(output.values())", "return [x * 0 if x.dim() == 4 else x for x in output.values()]"
        ),
        "test_generates_what_the_model_generates",
    ),
    "buffers of its own": (
        replaced(
            "structure.unflatten(inputs, self.spec)",
            "structure.unflatten([x.clone() for x in inputs], self.spec)",
            "return list(output.values())",
            "return [x if x.dim() != 4 else x * 0 for x in output.values()]",
        ),
        "test_generates_with_a_static_cache",
    ),
    "a shared output buffer": (
        replaced(
            "return list(output.values())",
            "self.kept = getattr(self, 'kept', {})\n"
            "        return [self.kept.setdefault((i, x.shape), torch.empty_like(x)).copy_(x)\n"
            "                for i, x in enumerate(output.values())]",
        ),
        "test_results_and_inputs_keep_their_values",
    ),
    "state in the process": (
        replaced(
            "    with untouched(call.model), torch.no_grad():",
            "    STATE.append(1)\n    with untouched(call.model), torch.no_grad():",
            "class EagerRunner:",
            "STATE = []\n\n\nclass EagerRunner:",
            "return list(output.values())",
            "return list(output.values()) if STATE else 1 / 0",
        ),
        "test_loaded_export_computes_the_same_in_a_fresh_process",
    ),
    "a misspelt hook": (
        added("@hookimpl\ndef polyport_lowr(traced, config):\n    return None"),
        "test_entry_point_resolves",
    ),
    "an unmarked hook": (
        added("def polyport_describe(component):\n    return None"),
        "test_hooks_are_known_and_marked",
    ),
    "a default argument": (
        replaced("metadata: ExportMetadata, trust: bool)", "metadata: ExportMetadata, trust: bool = False)"),
        "test_hooks_fit_their_specifications",
    ),
    "a wrong annotation": (
        replaced("traced: TracedProgram, config: EagerConfig)", "traced: CapturedCall, config: EagerConfig)"),
        "test_hooks_fit_their_specifications",
    ),
    "a heavy import": (added("import torch"), "test_plugin_is_light"),
    "a missing hook": (
        replaced("@hookimpl\ndef polyport_run(", "def run("),
        "test_entry_point_resolves",
    ),
    "unreadable metadata": (
        replaced("export_device=str(weight.device),", ""),
        "test_metadata_is_complete",
    ),
    "a patched torch": (
        replaced(
            "    weights = {name: tensor.clone()",
            "    import torch\n    gelu = torch.nn.functional.gelu\n"
            "    torch.nn.functional.gelu = lambda *a, **k: gelu(*a, **k)\n"
            "    weights = {name: tensor.clone()",
        ),
        "test_export_leaves_everything_as_it_was",
    ),
    "a changed model": (
        replaced("    weights = {name", "    traced.call.model.config.use_cache = None\n    weights = {name"),
        "test_export_leaves_everything_as_it_was",
    ),
    "changed weights": (
        replaced(
            "    weights = {name",
            "    next(traced.call.model.parameters()).data.mul_(2)\n    weights = {name",
        ),
        "test_export_leaves_everything_as_it_was",
    ),
    "a mode left on": (
        replaced(
            "    weights = {name", "    import torch\n    torch.set_grad_enabled(False)\n    weights = {name"
        ),
        "test_export_leaves_everything_as_it_was",
    ),
    "bytes that differ": (
        replaced("export_device=", "patches=(str(id(call)),), export_device="),
        "test_exporting_twice_gives_the_same_bytes",
    ),
    "a file beside the export": (
        replaced(
            "        return load_file(files[0])",
            "        (files[0].parent / 'cache').touch()\n        return load_file(files[0])",
        ),
        "test_loading_from_a_read_only_folder",
    ),
    "an unlisted file": (
        replaced("    return {name: (f", "    (directory / 'more').touch()\n    return {name: (f"),
        "test_manifest_lists_every_file",
    ),
    "a runtime's own error": (
        replaced(
            "    except Exception as error:\n        raise ArtifactError",
            "    except ZeroDivisionError as error:\n        raise ArtifactError",
        ),
        "test_hostile_export_is_refused",
    ),
    "an ignored device": (
        replaced('if request.device not in (None, "cpu"):', "if False:"),
        "test_unavailable_device_is_refused",
    ),
    "an ignored option": (replaced("    request.take()\n", ""), "test_unknown_runner_option_is_refused"),
}


@pytest.mark.parametrize("fault", list(WRONG))
def test_wrong_backend_fails(check: Callable[..., None], fault: str) -> None:
    change, test = WRONG[fault]
    with pytest.raises((Exception, pytest.fail.Exception)) as caught:
        check(test, change)
    assert not isinstance(caught.value, (SyntaxError, NameError, KeyError)), "the change itself is at fault"


@pytest.mark.parametrize("test", sorted({test for _, test in WRONG.values()}))
def test_right_backend_passes_each_of_them(check: Callable[..., None], test: str) -> None:
    check(test)


def test_requirement_without_an_upper_end_fails(check: Callable[..., None]) -> None:
    with pytest.raises(AssertionError, match="upper end"):
        check("test_requirements_are_ranges", metadata=METADATA.replace(",<1", ""))


class Fixed(Suite):
    supports_dynamic = False


class Untrusted(Suite):
    loading_needs_trust = True
    deterministic_bytes = False


def test_capabilities_choose_the_tests() -> None:
    assert Suite.test_dynamic_is_refused is None
    assert Suite.test_loading_without_trust_is_refused is None
    assert Fixed.test_dynamic_axes_have_names is None
    assert callable(BackendConformance.test_dynamic_axes_have_names)
    assert Untrusted.test_loading_needs_no_trust is None
    assert Untrusted.test_exporting_twice_gives_the_same_bytes is None


def test_claimed_capability_is_checked(check: Callable[..., None]) -> None:
    class Claiming(Untrusted):
        # what `needs` hides from backends without the capability, on one that claims it and lacks it
        test_loading_without_trust_is_refused = BackendConformance.test_loading_without_trust_is_refused

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check("test_loading_without_trust_is_refused", suite=Claiming)


def test_hidden_test_is_found() -> None:
    class Hiding(Suite):
        def test_threads(self) -> None: ...

    class Marked(Suite):
        @pytest.mark.xfail(strict=True, reason="https://example.org/issue")
        def test_threads(self) -> None: ...

    with pytest.raises(AssertionError, match="test_threads"):
        Hiding().test_no_standard_test_is_hidden()
    Marked().test_no_standard_test_is_hidden()
    Suite().test_no_standard_test_is_hidden()
