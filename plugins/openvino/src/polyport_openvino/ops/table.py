"""The table of our own translations and the decorator that fills it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

#: Called with the context, the node, and the arguments of the node as the FX graph has them; returns an `openvino.Output`, or a
#: list of them for an operator with several results.
Translation: TypeAlias = Callable[..., Any]

#: Whether a translation serves a node.
Condition: TypeAlias = Callable[[torch.fx.Node], bool]

_TABLE: dict[Any, tuple[Translation, Condition | None]] = {}

#: Translations of nodes that take or return complex numbers.
_COMPLEX: dict[Any, tuple[Translation, Condition | None]] = {}


def is_complex(node: torch.fx.Node) -> bool:
    """Whether a node takes or returns complex numbers."""
    values = (part.meta.get("val") for part in (node, *node.all_input_nodes))
    return any(isinstance(value, torch.Tensor) and value.dtype.is_complex for value in values)


def find(node: torch.fx.Node) -> Translation | None:
    """Our translation of a node, or None."""
    table = _COMPLEX if is_complex(node) else _TABLE
    found = table.get(node.target)
    if found is None and isinstance(node.target, torch._ops.OpOverload):
        found = table.get(str(node.target.name()))  # type: ignore[no-untyped-call]
    if found is None:
        return None
    translation, condition = found
    return translation if condition is None or condition(node) else None


def has(target: Any) -> bool:
    """Whether we translate an operator, for some of its uses at least."""
    name = str(target.name()) if isinstance(target, torch._ops.OpOverload) else None  # type: ignore[no-untyped-call]
    return any(key in table for table in (_TABLE, _COMPLEX) for key in (target, name))


def translates(*targets: Any, when: Condition | None = None) -> Callable[[Translation], Translation]:
    """Register a translation for overloads such as `torch.ops.aten.add.Tensor`, of real numbers.

    Args:
        targets: The overloads. An operator of a library that may not be imported yet is given by its name,
            `"library::operator"`.
        when: Whether the translation serves a node; by default it serves all.
    """
    return _registering(_TABLE, targets, when)


def translates_complex(*targets: Any) -> Callable[[Translation], Translation]:
    """Register a translation for overloads where they take or return complex numbers: pairs along a last axis."""
    return _registering(_COMPLEX, targets, None)


def _registering(
    table: dict[Any, tuple[Translation, Condition | None]], targets: Sequence[Any], when: Condition | None
) -> Callable[[Translation], Translation]:
    def register(function: Translation) -> Translation:
        for target in targets:
            if target in table:
                raise ValueError(f"{target} has a translation already: {table[target][0].__name__}")
            table[target] = (function, when)
        return function

    return register
