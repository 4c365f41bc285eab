"""The one test of every patch and graph fix.

Example::

    from polyport.testing.patches import check_patch
    from polyport_dynamo.fixes import PATCHES

    @pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
    def test_fix(patch):
        check_patch(patch)
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import warnings
from collections.abc import Callable
from typing import Any

import attrs
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from polyport.patching import GraphFix, Patch, Target, applied, in_window
from polyport.testing.leftovers import Upstream

_MISSING = object()


def check_patch(patch: Patch | GraphFix) -> None:
    """Check that a workaround is needed, works, and leaves nothing behind.

    Where the installed versions are in its window, its reproduction must fail without it and pass with it, and what it
    replaces must be the same object again afterwards, also after an error. Outside its window, the reproduction must pass
    unaided: then the window is right, and a workaround whose fault is gone fails here until its window is closed.

    Raises:
        AssertionError: Says what does not hold.
    """
    _check_form(patch)
    if not in_window(patch.affects):
        if all(_installed(name) for name in patch.affects):
            _unaided(patch)
        return
    assert _fault(patch) is not None, (
        f"{patch.id} has no fault to repair: its reproduction passes without it, although {_versions(patch)} is within "
        f"{dict(patch.affects)}. Close its window below this version, or delete it."
    )
    if isinstance(patch, GraphFix):
        _reproduce(patch, patch.apply)
        return
    forced = attrs.evolve(patch, applies=None)  # which model it is for is decided by the export, not here
    before, upstream = _found(patch), Upstream()
    with applied([forced]) as active:
        assert active == [patch.id]
        replaced = _found(patch)
        same = [
            target.path
            for target, was, now in zip(patch.targets, before, replaced, strict=True)
            if was is now
        ]
        assert not same or all(value is _MISSING for value in before), (
            f"{patch.id} does not replace {', '.join(same)}"
        )
        _reproduce(patch)
    _check_restored(patch, before, upstream)
    try:
        with applied([forced]):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    _check_restored(patch, before, upstream)


def _check_form(patch: Patch | GraphFix) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9_.]+)+", patch.id), (
        f"{patch.id!r} is not of the form <project>-<slug>"
    )
    assert patch.reason.strip(), f"{patch.id} gives no reason"
    linked = patch.upstream.startswith("https://") or patch.upstream == "unreported"
    assert linked, f"{patch.id}: `upstream` is a link or 'unreported', not {patch.upstream!r}"
    assert patch.affects, f"{patch.id} names no distribution that has the fault"
    for name, versions in patch.affects.items():
        try:
            SpecifierSet(versions)
        except InvalidSpecifier as error:
            raise AssertionError(f"{patch.id}: {name} has no version range {versions!r}") from error
    if isinstance(patch, Patch):
        assert patch.targets, f"{patch.id} replaces nothing"


def _reproduce(patch: Patch | GraphFix, fix: Callable[[Any], bool] = lambda program: False) -> None:  # noqa: ARG005
    """Run the reproduction; a graph fix's is given `fix`, by default one that does nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what upstream says meanwhile is not the point
        if isinstance(patch, GraphFix):
            patch.reproduce(fix)
        else:
            patch.reproduce()


def _fault(patch: Patch | GraphFix) -> Exception | None:
    """What the reproduction raises without the workaround."""
    try:
        _reproduce(patch)
    except Exception as error:  # noqa: BLE001  whatever form the fault takes
        return error
    return None


def _unaided(patch: Patch | GraphFix) -> None:
    fault = _fault(patch)
    if fault is not None:
        raise AssertionError(
            f"{patch.id}: the fault is there in {_versions(patch)}, which its window {dict(patch.affects)} leaves out."
        ) from fault


def _versions(patch: Patch | GraphFix) -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in patch.affects)


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _found(patch: Patch) -> list[Any]:
    """What each target holds itself (not what it inherits)."""
    return [_own(target) for target in patch.targets]


def _own(target: Target) -> Any:
    module, _, path = target.path.partition(":")
    *owners, attribute = path.split(".")
    try:
        owner = importlib.import_module(module)
        for name in owners:
            owner = getattr(owner, name)
    except (ImportError, AttributeError):
        return _MISSING
    return vars(owner).get(attribute, _MISSING)


def _check_restored(patch: Patch, before: list[Any], upstream: Upstream) -> None:
    for target, was, now in zip(patch.targets, before, _found(patch), strict=True):
        assert now is was, f"{patch.id} leaves {target.path} patched"
    # targets may be stand-ins for many places
    left = upstream.changes()
    assert not left, f"{patch.id} leaves something patched: " + "\n".join(left[:10])
