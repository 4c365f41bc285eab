from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from polyport.errors import BackendContractError
from polyport.patching import GraphFix, Patch, Target, applied, in_window


class Base:
    def inherited(self) -> str:
        return "inherited"


class Upstream(Base):
    value = 1

    def method(self) -> str:
        return "method"

    @staticmethod
    def static(x: int) -> int:
        return x

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    @property
    def computed(self) -> str:
        return "computed"


class Sub(Upstream):
    pass


def function() -> str:
    return "function"


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """These classes as a module of upstream's, importable by name."""
    upstream = types.ModuleType("upstream_for_tests")
    vars(upstream).update(Upstream=Upstream, Sub=Sub, function=function)
    monkeypatch.setitem(sys.modules, "upstream_for_tests", upstream)
    return upstream


def _patch(path: str, make: Callable[[Any], Any], **options: Any) -> Patch:
    targets = (Target(f"upstream_for_tests:{path}", make, options.pop("optional", False)),)
    return Patch(
        id=options.pop("id", "toy"),
        targets=options.pop("targets", targets),
        reason="It is broken.",
        upstream="unreported",
        affects=options.pop("affects", {"pytest": ">0"}),
        reproduce=lambda: None,
        **options,
    )


def _replace(value: Any) -> Callable[[Any], Any]:
    return lambda found: value


def test_active_inside_only(module: types.ModuleType) -> None:
    with applied([_patch("function", _replace(lambda: "patched"))]) as active:
        assert module.function() == "patched"
        assert active == ["toy"]
    assert module.function is function


def test_replacement_gets_what_was_there() -> None:
    with applied([_patch("Upstream.method", lambda found: lambda self: found(self).upper())]):
        assert Upstream().method() == "METHOD"
    assert Upstream().method() == "method"


@pytest.mark.parametrize("name", ["method", "static", "of_class", "computed", "value"])
def test_restored_by_identity(name: str) -> None:
    before = vars(Upstream)[name]
    with applied([_patch(f"Upstream.{name}", _replace(None))]):
        assert vars(Upstream)[name] is not before
    assert vars(Upstream)[name] is before


def test_inherited_attribute_leaves_no_copy() -> None:
    with applied([_patch("Sub.inherited", _replace(lambda self: "patched"))]):
        assert Sub().inherited() == "patched"
        assert Upstream().inherited() == "inherited"
    assert "inherited" not in vars(Sub)
    assert Sub().inherited() == "inherited"


def test_static_and_class_methods_stay_such() -> None:
    with applied(
        [
            _patch("Upstream.static", lambda found: lambda x: found(x) + 1),
            _patch("Upstream.of_class", lambda found: lambda cls: found(cls) + "!"),
        ]
    ):
        assert Upstream.static(1) == Upstream().static(1) == 2
        assert Sub.of_class() == Sub().of_class() == "Sub!"
    assert (Upstream.static(1), Sub.of_class()) == (1, "Sub")


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt(), SystemExit(), GeneratorExit()])
def test_restored_after(module: types.ModuleType, error: BaseException) -> None:
    with (
        pytest.raises(type(error)),
        applied([_patch("function", _replace(None)), _patch("Upstream.method", _replace(None))]),
    ):
        raise error
    assert module.function is function
    assert Upstream().method() == "method"


def test_what_else_changed_meanwhile_is_undone_too(module: types.ModuleType) -> None:
    with applied([_patch("function", _replace(None))]):
        module.function = "somebody else's"
    assert module.function is function


def test_deleted_meanwhile() -> None:
    with applied([_patch("Sub.inherited", _replace(None)), _patch("Upstream.value", _replace(2))]):
        del Sub.inherited  # type: ignore[misc]
        del Upstream.value
    assert Sub().inherited() == "inherited"
    assert Upstream.value == 1


def test_patches_on_one_target_stack() -> None:
    with applied(
        [
            _patch("Upstream.method", lambda found: lambda self: found(self) + "1", id="one"),
            _patch("Upstream.method", lambda found: lambda self: found(self) + "2", id="two"),
        ]
    ) as active:
        assert Upstream().method() == "method12"
        assert active == ["one", "two"]
    assert Upstream().method() == "method"


def test_re_entrant() -> None:
    patch = _patch("Upstream.method", lambda found: lambda self: found(self) + "+")
    with applied([patch]):
        with applied([patch]):
            assert Upstream().method() == "method++"
        assert Upstream().method() == "method+"
    assert Upstream().method() == "method"


def test_missing_target(module: types.ModuleType) -> None:
    good = _patch("function", _replace(None))
    with (
        pytest.raises(
            BackendContractError, match=r"patch toy replaces upstream_for_tests:Upstream\.gone.*upper end"
        ),
        applied([good, _patch("Upstream.gone", _replace(None))]),
    ):
        pass
    assert module.function is function


@pytest.mark.parametrize("path", ["Upstream.gone", "Gone.method", "gone"])
def test_missing_optional_target(path: str) -> None:
    with applied([_patch(path, _replace(None), optional=True)]) as active:
        assert active == []


def test_missing_module() -> None:
    target = Target("a_module_that_is_not_there:x", _replace(None), optional=True)
    with applied([_patch("", _replace(None), targets=(target,))]) as active:
        assert active == []


def test_replacement_that_fails_to_be_made(module: types.ModuleType) -> None:
    def fail(_: Any) -> Any:
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        applied([_patch("function", _replace(None)), _patch("Upstream.method", fail)]),
    ):
        pass
    assert module.function is function


def test_only_for_models_that_need_it() -> None:
    patch = _patch("Upstream.value", _replace(2), applies=lambda model: model == "this one")
    with applied([patch], "another") as active:
        assert (Upstream.value, active) == (1, [])
    with applied([patch], "this one") as active:
        assert (Upstream.value, active) == (2, ["toy"])


def test_graph_fixes_are_not_patches() -> None:
    fix = GraphFix(
        id="fix", apply=lambda program: True, reason="", upstream="", affects={}, reproduce=lambda apply: None
    )
    with applied([fix]) as active:
        assert active == []


@pytest.mark.parametrize(
    ("versions", "affects", "inside"),
    [
        ({"lib": "2.13.0+cpu"}, {"lib": "<2.14"}, True),
        ({"lib": "2.13.0+cpu"}, {"lib": "==2.13.0"}, True),
        ({"lib": "2.14.0.dev1"}, {"lib": "<2.14"}, False),
        ({"lib": "2.13.0rc2"}, {"lib": ">=2.13"}, True),
        ({"lib": "1.0"}, {"lib": ""}, True),
        ({"lib": "1.0", "other": "5"}, {"lib": ">=1", "other": "<5"}, False),
        ({"lib": "1.0"}, {"missing": ">0"}, False),
        ({}, {}, True),
    ],
)
def test_windows(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], affects: dict[str, str], inside: bool
) -> None:
    from importlib import metadata

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    assert in_window(affects) is inside
    with applied([_patch("Upstream.value", _replace(2), affects=affects)]):
        assert Upstream.value == (2 if inside else 1)


def test_two_threads_take_turns() -> None:
    """Patches change what the whole process shares, so one export waits for the other."""
    inside, peak, wrong = 0, 0, []

    def work(number: int) -> None:
        nonlocal inside, peak
        for _ in range(20):
            with applied([_patch("Upstream.value", _replace(number))]):
                inside += 1
                peak = max(peak, inside)
                if Upstream.value != number:
                    wrong.append(number)
                threading.Event().wait(0.0005)
                inside -= 1

    threads = [threading.Thread(target=work, args=(number,)) for number in (7, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (peak, wrong, Upstream.value) == (1, [], 1)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = {cls: dict(vars(cls)) for cls in (Base, Upstream, Sub)}
    yield
    assert {cls: dict(vars(cls)) for cls in (Base, Upstream, Sub)} == before
