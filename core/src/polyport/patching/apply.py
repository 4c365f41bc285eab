"""Applying patches: in a stack, under a lock, restoring what was found on entry."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from polyport.errors import BackendContractError
from polyport.patching.patch import GraphFix, Patch, Target

logger = logging.getLogger(__name__)

#: Patches change modules that the whole process shares, so one export at a time applies them. Re-entrant, because a stage
#: may run another export (a generation export traces several components).
_LOCK = threading.RLock()

_MISSING = object()


def in_window(affects: Mapping[str, str]) -> bool:
    """Whether every named distribution is installed in a version of its range.

    Release candidates and local builds count as their release: `2.13.0+cpu` and `2.13.0.dev1` are both 2.13.0.
    """
    for distribution, versions in affects.items():
        try:
            installed = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return False
        if Version(Version(installed).base_version) not in SpecifierSet(versions):
            return False
    return True


@contextmanager
def applied(patches: Iterable[Patch | GraphFix], model: Any = None) -> Iterator[list[str]]:
    """Keep patches active for the body of a `with`.

    Args:
        patches: Candidates; graph fixes among them are ignored here.
        model: The model that decides which of them apply.

    Yields:
        Ids of the patches that are active.

    Raises:
        BackendContractError: A patch names an attribute that doesn't exist.
    """
    with _LOCK, ExitStack() as stack:
        active: list[str] = []
        for patch in patches:
            if not isinstance(patch, Patch) or not in_window(patch.affects):
                continue
            if patch.applies is not None and not patch.applies(model):
                continue
            replaced = [stack.enter_context(_replaced(target, patch)) for target in patch.targets]
            if any(replaced):
                active.append(patch.id)
                logger.debug("patch %s active (%s)", patch.id, patch.upstream)
        yield active


@contextmanager
def _replaced(target: Target, patch: Patch) -> Iterator[bool]:
    """Replace one attribute for the body of a `with`; yields whether it was there."""
    module_name, _, attribute_path = target.path.partition(":")
    *owners, attribute = attribute_path.split(".")
    try:
        owner = importlib.import_module(module_name)
        for name in owners:
            owner = getattr(owner, name)
        found = getattr(owner, attribute)
    except (ImportError, AttributeError) as error:
        if target.optional:
            yield False
            return
        raise BackendContractError(
            f"The patch {patch.id} replaces {target.path}, which the installed version doesn't have ({error}). "
            "Its version window needs an upper end.",
        ) from error
    # what the owner itself holds, not what it inherits: a patched subclass must not keep a copy afterwards
    own = vars(owner).get(attribute, _MISSING)
    replacement = _made(target, owner, attribute, found)
    try:
        setattr(owner, attribute, replacement)
        yield True
    finally:
        if own is not _MISSING:
            setattr(owner, attribute, own)
        else:
            with suppress(AttributeError):  # gone already
                delattr(owner, attribute)


def _made(target: Target, owner: Any, attribute: str, found: Any) -> Any:
    """The replacement, as a method of the kind that it replaces."""
    static = inspect.getattr_static(owner, attribute) if isinstance(owner, type) else None
    if isinstance(static, staticmethod):
        return staticmethod(target.make(found))
    if isinstance(static, classmethod):
        return classmethod(target.make(static.__func__))
    return target.make(found)
