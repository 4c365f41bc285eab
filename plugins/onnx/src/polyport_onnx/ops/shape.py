"""Operators that move elements without changing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from polyport_dynamo.lowering.facts import END, dims, is_whole, symbolic, traced
from polyport_onnx.context import Context
from polyport_onnx.ops.table import translates

aten = torch.ops.aten
Node = torch.fx.Node


def reshape_to(
    c: Context, value: ir.Value, source: Sequence[Any], target: Sequence[Any], free: int | None = None
) -> ir.Value:
    """Reshape with as little shape arithmetic as possible.

    Args:
        c: takes the nodes.
        value: to be reshaped.
        source: its shape, ints and sympy expressions.
        target: the wanted shape, the same.
        free: the dimension that the program leaves open, if it does.
    """
    if list(source) == list(target):
        return value
    if any(dim == 0 for dim in target if isinstance(dim, int)):
        shape = c.emit.concat([_known(c, dim) for dim in target]) if target else c.emit.ints()
        return c.emit.op("Reshape", value, shape, allowzero=1)
    # A dimension that stays in place is 0 in ONNX; one that is not known as a number can be -1.
    plan: list[Any] = []
    for index, dim in enumerate(target):
        same = not isinstance(dim, int) and index < len(source) and source[index] == dim
        plan.append(0 if same else dim)
    unknown = [index for index, dim in enumerate(plan) if not isinstance(dim, int)]
    if unknown:
        if free not in unknown:
            unreachable = (index for index in unknown if c.expression(plan[index]) is None)
            free = unknown[0] if len(unknown) == 1 else next(unreachable, unknown[0])
        plan[free] = -1
    parts: list[ir.Value] = []
    run: list[int] = []
    for dim in plan:
        if isinstance(dim, int):
            run.append(dim)
            continue
        if run:
            parts.append(c.emit.ints(*run))
            run = []
        parts.append(_known(c, dim))
    if run or not parts:
        parts.append(c.emit.ints(*run))
    return c.emit.op("Reshape", value, c.emit.concat(parts))


def _known(c: Context, dim: Any) -> ir.Value:
    found = c.expression(dim)
    if found is None:
        raise ValueError(f"the size {dim} cannot be computed from the inputs")
    return found


@translates(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
            aten.unflatten.int, aten._reshape_alias.default, aten.view_as.default)  # fmt: skip
def reshape(c: Context, node: Node, self: Node, *args: Any, **options: Any) -> Any:
    """Every kind of reshape: the tracer has recorded the result's shape."""
    if options and "size" not in options and "shape" not in options:
        return NotImplemented
    target, free = dims(node), None
    wanted = options.get("size", options.get("shape", args[0] if args else None))
    if isinstance(wanted, (list, tuple)) and len(wanted) == len(target):
        for index, size in enumerate(wanted):
            if isinstance(size, Node):
                target[index] = symbolic(size.meta["val"])
            elif size == -1:
                free = index
            else:  # The tracer's shape may be an expression which is this number, but does not look like one.
                target[index] = size
    return reshape_to(c, c.value(self), dims(self), target, free)


def transposed(c: Context, value: ir.Value, order: Sequence[int]) -> ir.Value:
    """Transpose, merged with the transpose that made the value."""
    producer = value.producer()
    if producer is not None and producer.op_type == "Transpose" and producer.inputs[0] is not None:
        before = producer.attributes["perm"].as_ints()
        value, order = producer.inputs[0], [before[axis] for axis in order]
    if list(order) == list(range(len(order))):
        return value
    return c.emit.op("Transpose", value, perm=list(order))


@translates(aten.transpose.int)
def transpose(c: Context, node: Node, self: Node, dim0: int, dim1: int) -> Any:
    """Swap two axes."""
    del node
    order = list(range(traced(self).dim()))
    if not order:
        return c.value(self)
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return transposed(c, c.value(self), order)


@translates(aten.permute.default)
def permute(c: Context, node: Node, self: Node, dims: Sequence[int]) -> Any:
    """Reorder the axes."""
    del node
    rank = traced(self).dim()
    return transposed(c, c.value(self), [dim % rank for dim in dims])


@translates(aten.t.default, aten.numpy_T.default, aten.mT.default)
def matrix_transpose(c: Context, node: Node, self: Node) -> Any:
    """The transpose of a matrix."""
    rank = traced(self).dim()
    if rank < 2:
        return c.value(self)
    order = list(range(rank))
    if node.target is aten.numpy_T.default:
        order.reverse()
    else:
        order[-2:] = order[-1], order[-2]
    return transposed(c, c.value(self), order)


@translates(aten.unsqueeze.default)
def unsqueeze(c: Context, node: Node, self: Node, dim: int) -> Any:
    """A new axis of length 1."""
    return c.emit.op("Unsqueeze", c.value(self), c.emit.ints(dim % traced(node).dim()))


@translates(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def squeeze(c: Context, node: Node, self: Node, dim: Any = None) -> Any:
    """Drop axes of length 1. An axis whose length is not known is kept, as the tracer decided."""
    rank = traced(self).dim()
    asked = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
    axes = sorted({axis % rank for axis in asked if dims(self)[axis % rank] == 1}) if rank else []
    if rank - len(axes) != traced(node).dim():
        return NotImplemented
    return c.emit.op("Squeeze", c.value(self), c.emit.ints(*axes)) if axes else c.value(self)


@translates(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
def expand(c: Context, node: Node, self: Node, *args: Any, **options: Any) -> Any:
    """Repeat along axes of length 1, and along new ones in front."""
    del args, options
    source, target = dims(self), dims(node)
    aligned = [None] * (len(target) - len(source)) + source
    if aligned == target:
        return c.value(self)
    # In ONNX, 1 leaves a dimension as it is.
    sizes = [
        1 if old == new else size for old, new, size in zip(aligned, target, traced(node).shape, strict=True)
    ]
    return c.emit.op("Expand", c.value(self), c.sizes(sizes))


@translates(aten.slice.Tensor)
def slice_(
    c: Context, node: Node, self: Node, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Any:
    """A range of an axis."""
    del node
    axis = dim % traced(self).dim()
    if is_whole(dims(self)[axis], start, end) and step == 1:
        return c.value(self)
    bounds = [c.sizes([bound]) for bound in (0 if start is None else start, END if end is None else end)]
    return c.emit.op("Slice", c.value(self), *bounds, c.emit.ints(axis), c.sizes([step]))


@translates(aten.select.int)
def select(c: Context, node: Node, self: Node, dim: int, index: Any) -> Any:
    """One element of an axis."""
    del node
    return c.emit.op("Gather", c.value(self), c.tensor(index, torch.int64), axis=dim)


@translates(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.split.sizes)
def split(c: Context, node: Node, self: Node, sizes: Any, dim: int = 0) -> Any:
    """Parts of an axis, of lengths that the tracer has recorded."""
    del sizes
    parts = node.meta["val"]
    axis = dim % traced(self).dim()
    if len(parts) == 1:
        return [c.value(self)]
    lengths = c.sizes([part.shape[axis] for part in parts])
    made = c.emit.ops("Split", c.value(self), lengths, outputs=len(parts), axis=axis)
    return list(made)
