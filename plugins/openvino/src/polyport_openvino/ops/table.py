"""The table of our own translations and the decorator that fills it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

#: Called with the context, the node, and the arguments of the node as the FX graph has them; returns an `openvino.Output`, or a
#: list of them for an operator with several results.
Translation: TypeAlias = Callable[..., Any]

#: Whether a translation serves a node.
Condition: TypeAlias = Callable[[torch.fx.Node], bool]

_TABLE: dict[Any, tuple[Translation, Condition | None]] = {}


def find(node: torch.fx.Node) -> Translation | None:
    """Our translation of a node, or None."""
    found = _TABLE.get(node.target)
    if found is None and isinstance(node.target, torch._ops.OpOverload):
        found = _TABLE.get(str(node.target.name()))  # type: ignore[no-untyped-call]
    if found is None:
        return None
    translation, condition = found
    return translation if condition is None or condition(node) else None


def translates(*targets: Any, when: Condition | None = None) -> Callable[[Translation], Translation]:
    """Register a translation for overloads such as `torch.ops.aten.add.Tensor`.

    Args:
        targets: The overloads. An operator of a library that may not be imported yet is given by its name,
            `"library::operator"`.
        when: Whether the translation serves a node; by default it serves all.
    """

    def register(function: Translation) -> Translation:
        for target in targets:
            if target in _TABLE:
                raise ValueError(f"{target} has a translation already: {_TABLE[target][0].__name__}")
            _TABLE[target] = (function, when)
        return function

    return register
