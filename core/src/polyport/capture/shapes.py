"""The user's own `dynamic_shapes`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from polyport import structure
from polyport.capture.prepare import STAGE, is_constant
from polyport.errors import ExportError


def checked_shapes(shapes: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The user's shapes with an entry for every input; what they don't name stays static.

    Args:
        shapes: As `torch.export.export` takes it, per forward kwarg.
        kwargs: The prepared kwargs.

    Raises:
        ExportError: Shapes that are no mapping, or name an input that the call doesn't have.
    """
    inputs = [name for name, value in kwargs.items() if not is_constant(value)]
    if not isinstance(shapes, Mapping):
        raise ExportError(
            f"dynamic_shapes is a dict with an entry per input ({', '.join(inputs)}), not {type(shapes).__name__}.",
            stage=STAGE,
        )
    for name in shapes:
        if name not in inputs:
            near = difflib.get_close_matches(str(name), inputs, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ExportError(
                f"dynamic_shapes names {name!r}, which is none of the inputs.{hint} Inputs: {', '.join(inputs)}.",
                stage=STAGE,
            )
    return {name: shapes[name] if name in shapes else static(kwargs[name]) for name in inputs}


def static(value: Any) -> Any:
    """The entry for an input all of whose axes are fixed."""
    leaves, spec = structure.flatten(value)
    if spec.is_leaf():
        return None
    # an axis-free mark per leaf, in the nesting of the value
    if type(value) is dict:
        return {key: static(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(static(inner) for inner in value)
    return [None] * len(leaves)
