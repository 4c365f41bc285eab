"""Operators that move elements without changing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polyport_dynamo.lowering.facts import END, dims, is_whole, symbolic, traced
from polyport_openvino.context import Context
from polyport_openvino.ops.table import translates

aten = torch.ops.aten
Node = torch.fx.Node


@translates(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
            aten.unflatten.int, aten._reshape_alias.default, aten.view_as.default)  # fmt: skip
def reshape(c: Context, node: Node, self: Node, *args: Any, **options: Any) -> Any:
    """Every kind of reshape: the tracer has recorded the result's shape.

    A dimension that stays in its place is 0, which needs no arithmetic in the graph; of those that are left, one may be -1.
    """
    source, target = dims(self), dims(node)
    if source == target:
        return c.value(self)
    sizes: list[Any] = list(traced(node).shape)
    wanted = options.get("size", options.get("shape", args[0] if args else None))
    left_open = None
    if isinstance(wanted, (list, tuple)) and len(wanted) == len(target):
        for index, size in enumerate(wanted):
            if size == -1:
                left_open = index
            else:  # the tracer's size may be an expression that is this number, but does not look like one
                sizes[index] = size
                target[index] = size if isinstance(size, int) else symbolic(size.meta["val"])
    if 0 in (size for size in target if isinstance(size, int)):  # 0 has two meanings then
        return c.op("reshape", c.value(self), c.sizes(sizes), False)
    open_axes = []
    for index, size in enumerate(target):
        if isinstance(size, int):
            continue
        if index < len(source) and source[index] == size:
            sizes[index] = 0
        else:
            open_axes.append(index)
    if open_axes:
        if left_open not in open_axes:
            unknown = (
                index
                for index in open_axes
                if not isinstance(sizes[index], Node) and c.expression(target[index]) is None
            )
            left_open = next(unknown, open_axes[0])
        sizes[left_open] = -1
    return c.op("reshape", c.value(self), c.sizes(sizes), True)


@translates(aten.transpose.int)
def transpose(c: Context, node: Node, self: Node, dim0: int, dim1: int) -> Any:
    """Swap two axes."""
    del node
    order = list(range(traced(self).dim()))
    if not order:
        return c.value(self)
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return c.op("transpose", c.value(self), c.ints(*order))


@translates(aten.permute.default)
def permute(c: Context, node: Node, self: Node, dims: Sequence[int]) -> Any:
    """Reorder the axes."""
    del node
    rank = traced(self).dim()
    return c.op("transpose", c.value(self), c.ints(*(dim % rank for dim in dims)))


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
    return c.op("transpose", c.value(self), c.ints(*order))


@translates(aten.unsqueeze.default)
def unsqueeze(c: Context, node: Node, self: Node, dim: int) -> Any:
    """A new axis of length 1."""
    return c.op("unsqueeze", c.value(self), c.constant(dim % traced(node).dim(), torch.int64))


@translates(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def squeeze(c: Context, node: Node, self: Node, dim: Any = None) -> Any:
    """Drop axes of length 1. An axis whose length is not known is kept, as the tracer decided."""
    rank = traced(self).dim()
    asked = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
    axes = sorted({axis % rank for axis in asked if dims(self)[axis % rank] == 1}) if rank else []
    if rank - len(axes) != traced(node).dim():
        raise ValueError(f"which axes {node.format_node()} drops is not known")
    return c.op("squeeze", c.value(self), c.ints(*axes)) if axes else c.value(self)


@translates(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
def expand(c: Context, node: Node, self: Node, *args: Any, **options: Any) -> Any:
    """Repeat along axes of length 1, and along new ones in front."""
    del args, options
    source, target = dims(self), dims(node)
    aligned = [None] * (len(target) - len(source)) + source
    if aligned == target:
        return c.value(self)
    # 1 leaves a dimension as it is
    sizes = [
        1 if old == new else size for old, new, size in zip(aligned, target, traced(node).shape, strict=True)
    ]
    return c.op("broadcast", c.value(self), c.sizes(sizes), broadcast_spec="BIDIRECTIONAL")


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
    return c.op("slice", c.value(self), *bounds, c.sizes([step]), c.ints(axis))


@translates(aten.select.int)
def select(c: Context, node: Node, self: Node, dim: int, index: Any) -> Any:
    """One element of an axis."""
    del node
    axis = c.constant(dim % traced(self).dim(), torch.int64)
    return c.op("gather", c.value(self), c.tensor(index, torch.int64), axis)


@translates(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.split.sizes,
            aten.unbind.int, aten.tensor_split.sections)  # fmt: skip
def split(c: Context, node: Node, self: Node, *args: Any, **options: Any) -> Any:
    """Parts of an axis, of lengths that the tracer has recorded."""
    unbinds = node.target is aten.unbind.int
    dim = options.get("dim", args[0] if unbinds and args else args[1] if len(args) > 1 else 0)
    axis = dim % traced(self).dim()
    parts = node.meta["val"]
    lengths = [1 if unbinds else part.shape[axis] for part in parts]
    along = c.constant(axis, torch.int64)
    if len(parts) == 1:
        made = [c.value(self)]
    else:
        divided = c.op("variadic_split", c.value(self), along, c.sizes(lengths)).get_node()
        made = list(divided.outputs())
    return [c.op("squeeze", part, along) for part in made] if unbinds else made


@translates(aten.cat.default, aten.stack.default)
def cat(c: Context, node: Node, tensors: Sequence[Node], dim: int = 0) -> Any:
    """Concatenate, or stack along a new axis. torch ignores empty vectors among tensors of higher rank."""
    dtype, rank = traced(node).dtype, traced(node).dim()
    axis = dim % rank
    if node.target is aten.stack.default:
        along = c.constant(axis, torch.int64)
        parts = [c.op("unsqueeze", c.tensor(part, dtype), along) for part in tensors]
    else:
        parts = [c.tensor(part, dtype) for part in tensors if traced(part).dim() == rank]
    # the last axis is written -1: OpenVINO's fusion of rotary embeddings looks for that
    return parts[0] if len(parts) == 1 else c.op("concat", parts, -1 if axis == rank - 1 else axis)
