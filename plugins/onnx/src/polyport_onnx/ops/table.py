"""The table of our own translations and the decorator that fills it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

#: Called with the context, the node, and the arguments of the node as the FX graph has them; returns an ONNX value, a
#: list of them for an operator with several results, or NotImplemented to leave this call to torchlib.
Translation: TypeAlias = Callable[..., Any]

TABLE: dict[Any, Translation] = {}


def find(target: Any) -> Translation | None:
    """The translation of what an FX node calls, or None."""
    found = TABLE.get(target)
    if found is None and isinstance(target, torch._ops.OpOverload):
        found = TABLE.get(str(target.name()))  # type: ignore[no-untyped-call]
    return found


def translates(*targets: Any) -> Callable[[Translation], Translation]:
    """Register a translation for overloads such as `torch.ops.aten.add.Tensor`.

    An operator of a library that may not be imported yet is given by its name, `"library::operator"`.
    """

    def register(function: Translation) -> Translation:
        for target in targets:
            if target in TABLE:
                raise ValueError(f"{target} has a translation already: {TABLE[target].__name__}")
            TABLE[target] = function
        return function

    return register
