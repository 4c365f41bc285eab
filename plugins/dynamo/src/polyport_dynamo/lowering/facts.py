"""What the tracer has recorded about a graph, as translations ask for it."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch

Node = torch.fx.Node

#: Where a range ends that has no end.
END = torch.iinfo(torch.int64).max


def symbolic(value: Any) -> Any:
    """A traced size as an int or a sympy expression; None where it is no integer."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        return None
    if isinstance(value, int):
        return value
    expression = value.node.expr
    return int(expression) if expression.is_number else expression


def traced(node: Node) -> torch.Tensor:
    """The fake tensor that the tracer recorded for a node.

    Raises:
        TypeError: The node is no tensor.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{node.name} is no tensor but {type(value).__name__}")
    return value


def dims(node: Node) -> list[Any]:
    """The shape of a node, each dimension as an int or a sympy expression."""
    return [symbolic(size) for size in traced(node).shape]


def common_dtype(left: Any, right: Any) -> torch.dtype:
    """Torch's common type of two operands, each an FX node or a Python number."""
    return torch.result_type(_promoted(left), _promoted(right))


def _promoted(operand: Any) -> Any:
    """What stands for an operand when torch works out a common type."""
    value = operand.meta["val"] if isinstance(operand, Node) else operand
    if isinstance(value, torch.SymInt):
        return 1
    if isinstance(value, torch.SymFloat):
        return 1.0
    return True if isinstance(value, torch.SymBool) else value


def is_whole(size: Any, start: Any, end: Any) -> bool:
    """Whether a range covers an axis whatever its size.

    That the traced shapes are equal says less: `[-8:]` covers the axis of a sample shorter than 8, and not that of others.

    Args:
        size: Of the axis (see `dims`).
        start: Of the range, as the graph has it.
        end: The same.
    """
    if start not in (None, 0):
        return False
    if isinstance(end, Node):
        return bool(symbolic(end.meta["val"]) == size)
    return end is None or end == END or (isinstance(size, int) and end >= size)


def may_be_infinite(mask: Node, inputs: Collection[Node]) -> bool:
    """Whether a float mask can contain -inf: it comes from the caller, or the program writes infinities into it.

    Args:
        mask: The mask.
        inputs: What a caller passes.
    """
    seen, waiting = {mask}, [mask]
    while waiting:
        node = waiting.pop()
        if node in inputs and traced(node).dtype.is_floating_point:
            return True
        if any(isinstance(arg, float) and math.isinf(arg) for arg in (*node.args, *node.kwargs.values())):
            return True
        fresh = [source for source in node.all_input_nodes if source not in seen]
        seen.update(fresh)
        waiting.extend(fresh)
    return False
