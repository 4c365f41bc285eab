"""`check_patch` passes a workaround that is needed, works and leaves nothing; it fails every other one."""

from __future__ import annotations

import math

import attrs
import pytest

from polyport.patching import GraphFix, Patch, Target
from polyport.testing import check_patch


def _reproduce() -> None:
    if math.floor(1.5) == 1:
        raise ValueError("floor rounds down")


#: A workaround of a "fault" that every Python has.
PATCH = Patch(
    id="python-floor",
    targets=(Target("math:floor", lambda found: lambda x: found(x) + 1),),
    reason="math.floor rounds down.",
    upstream="unreported",
    affects={"torch": ">=2"},
    reproduce=_reproduce,
)


def _reproduce_graph(fix) -> None:
    if not fix(None):
        raise ValueError("not repaired")


FIX = GraphFix(
    id="torch-nothing",
    apply=lambda program: True,
    reason="Nothing is wrong.",
    upstream="https://example.org/1",
    affects={"torch": ">=2"},
    reproduce=_reproduce_graph,
)


@pytest.mark.parametrize("patch", [PATCH, FIX], ids=["patch", "fix"])
def test_right_one_passes(patch: Patch | GraphFix) -> None:
    floor = math.floor
    check_patch(patch)
    assert math.floor is floor


@pytest.mark.parametrize("patch", [PATCH, FIX], ids=["patch", "fix"])
def test_window_that_leaves_a_faulty_version_out_fails(patch: Patch | GraphFix) -> None:
    with pytest.raises(AssertionError, match="leaves out"):
        check_patch(attrs.evolve(patch, affects={"torch": "<2"}))


def test_out_of_its_window_it_passes_unaided() -> None:
    check_patch(attrs.evolve(PATCH, affects={"torch": "<2"}, reproduce=lambda: None))


def test_distribution_that_is_not_installed_proves_nothing() -> None:
    check_patch(attrs.evolve(PATCH, affects={"no-such-distribution": ">=1"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reproduce": lambda: None}, "no fault to repair"),
        ({"targets": (Target("math:floor", lambda found: found),)}, "does not replace"),
        ({"id": "floor"}, "<project>-<slug>"),
        ({"reason": " "}, "no reason"),
        ({"upstream": "somewhere"}, "link"),
        ({"affects": {}}, "no distribution"),
        ({"affects": {"torch": "about 2"}}, "no version range"),
        ({"targets": ()}, "replaces nothing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_one_fails(change: dict, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_patch(attrs.evolve(PATCH, **change))


def test_patch_that_does_not_help_fails() -> None:
    with pytest.raises(ValueError, match="rounds down"):
        check_patch(attrs.evolve(PATCH, targets=(Target("math:floor", lambda found: lambda x: found(x)),)))


def test_stand_in_that_leaves_its_places_patched_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    import torch

    monkeypatch.setattr(torch, "is_tensor", torch.is_tensor)  # to put it back after this test

    class StandIn(types.ModuleType):
        floor = None

        def __setattr__(self, name: str, value: object) -> None:
            torch.is_tensor = lambda x: False
            super().__setattr__(name, value)

    monkeypatch.setitem(sys.modules, "stand_in", StandIn("stand_in"))
    targets = (*PATCH.targets, Target("stand_in:floor", lambda found: lambda x: x))
    with pytest.raises(AssertionError, match="leaves something patched"):
        check_patch(attrs.evolve(PATCH, targets=targets))
