"""Comparing the signature of a hook implementation with the hook's specification.

pluggy looks at names only, so an implementation with wrong types, or one that pluggy will never pass an argument to, is
found by nobody but this.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from polyport import hookspecs, patching, pipeline

#: What the specifications import for type checkers only.
_SPEC_NAMES = {**vars(pipeline), **vars(patching), **vars(hookspecs)}


def problems(name: str, implementation: Callable[..., Any]) -> Iterator[str]:
    """What is wrong with an implementation of a hook; nothing if it fits.

    Parameters without an annotation fit. One with an annotation must be the specification's or a subclass of it (a
    backend gets its own config); a return value must be one of those the specification allows.

    Args:
        name: Name of the hook.
        implementation: The function or bound method.
    """
    spec = inspect.signature(getattr(hookspecs, name))
    signature = inspect.signature(implementation)
    names = {**_SPEC_NAMES, **vars(sys.modules.get(implementation.__module__, types.ModuleType("")))}
    for parameter in signature.parameters.values():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            yield f"{name}({parameter}): pluggy passes arguments by name, so `*` and `**` get nothing"
        elif parameter.default is not parameter.empty:
            yield f"{name}({parameter}): pluggy never passes an argument that has a default"
        elif parameter.name not in spec.parameters:
            yield f"{name}({parameter}): the specification has {', '.join(spec.parameters) or 'no arguments'}"
        else:
            wanted, found = spec.parameters[parameter.name].annotation, parameter.annotation
            if not _fits(found, wanted, names):
                yield f"{name}({parameter}): the specification says {wanted}"
    if not _fits(signature.return_annotation, spec.return_annotation, names):
        yield f"{name} -> {signature.return_annotation}: the specification says {spec.return_annotation}"


def _fits(found: Any, wanted: Any, names: dict[str, Any]) -> bool:
    if found is inspect.Signature.empty or found == wanted:
        return True
    wanted = _resolve(wanted, _SPEC_NAMES)
    if wanted is Any:
        return True
    found = _resolve(found, names)
    choices = _members(wanted)
    return found == wanted or all(any(_is(one, choice) for choice in choices) for one in _members(found))


def _is(found: Any, wanted: Any) -> bool:
    if found == wanted:
        return True
    origin, base = typing.get_origin(found) or found, typing.get_origin(wanted) or wanted
    return isinstance(origin, type) and isinstance(base, type) and issubclass(origin, base)


def _members(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _resolve(annotation: Any, names: dict[str, Any]) -> Any:
    """What the text of an annotation stands for; the text itself where its names are imported for type checkers only."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, dict(names))  # noqa: S307  the installed plugin's own source
    except (NameError, AttributeError):
        return annotation
