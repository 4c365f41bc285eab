"""Elements picked by, and written to, places that are known when the model runs.

The frontend lets negative indices through to operators that do not know them, and takes masks for numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openvino as ov
import torch

from polyport_dynamo.lowering.facts import dims, symbolic, traced
from polyport_openvino.context import Context
from polyport_openvino.ops.table import translates

aten = torch.ops.aten
Node = torch.fx.Node

#: Operators that keep the elements of their first argument.
_KEEPS = frozenset({aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.expand.default,
                    aten.to.dtype, aten._to_copy.default, aten.slice.Tensor, aten.clone.default, aten.contiguous.default,
                    aten.select.int, aten.transpose.int, aten.permute.default, aten.squeeze.dim})  # fmt: skip


def _counts_up(node: Node) -> bool:
    """Whether indices are parts of a range from a number that is not negative."""
    while node.target in _KEEPS and isinstance(source := node.args[0], torch.fx.Node):
        node = source
    if node.target in (aten.arange.default, aten.arange.start):
        start = node.args[0] if node.target is aten.arange.start else 0
        return isinstance(start, int) and start >= 0
    return False


def positions(c: Context, self: Node, axis: int, index: Node) -> ov.Output:
    """Indices of one axis as int64, those from its end counted from its start."""
    value = c.tensor(index, torch.int64)
    if traced(index).dtype == torch.uint8 or _counts_up(index):
        return value

    def make() -> ov.Output:
        size = c.scalar(traced(self).shape[axis])
        negative = c.op("less", value, c.constant(0, torch.int64))
        return c.op("select", negative, c.op("add", value, size), value)

    return c.once(("positions", index, dims(self)[axis]), make)


def _spread(c: Context, self: Node, indices: Sequence[Node | None]) -> list[tuple[int, ov.Output, Any]]:
    """Axes with their indices: a mask of n axes is n vectors of indices. With each comes its shape, None where not known."""
    found: list[tuple[int, ov.Output, Any]] = []
    axis = 0
    for index in indices:
        if index is None:
            axis += 1
            continue
        fake = traced(index)
        if fake.dtype != torch.bool:
            found.append((axis, positions(c, self, axis, index), list(fake.shape)))
            axis += 1
            continue
        places = c.once(("places", index), lambda mask=index: _places(c, mask))
        for part in range(fake.dim()):
            found.append(
                (
                    axis,
                    c.op("gather", places, c.constant(part, torch.int64), c.constant(0, torch.int64)),
                    None,
                )
            )
            axis += 1
    return found


def _places(c: Context, mask: Node) -> ov.Output:
    """Where a mask holds: a matrix with a row per axis and a column per place, in the order of the elements."""
    return c.op("non_zero", c.tensor(mask, torch.int32), "i64")


def _together(c: Context, found: list[tuple[int, ov.Output, Any]]) -> list[ov.Output]:
    """The index tensors of several axes, each with the shape that all have together."""
    values = [value for _, value, _ in found]
    shapes = [shape for *_, shape in found]
    if all(shape is None for shape in shapes):
        return values
    if all(shape is not None for shape in shapes):
        sizes = [[symbolic(size) for size in shape] for shape in shapes]
        if all(size == sizes[0] for size in sizes):
            return values
        common = c.sizes(_broadcast(shapes))
        return [c.op("broadcast", value, common, broadcast_spec="NUMPY") for value in values]
    total = values[0]
    for value in values[1:]:  # a mask with other indices: how many places it has is known at run time only
        total = c.op("add", total, value)
    shape = c.op("shape_of", total, output_type="i64")
    return [c.op("broadcast", value, shape, broadcast_spec="NUMPY") for value in values]


def _broadcast(shapes: list[Any]) -> list[Any]:
    """The shape that tensors have together: of each axis the size that is not 1. It asks nothing of symbols."""
    rank = max(map(len, shapes))
    together: list[Any] = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if symbolic(size) != 1:
                together[axis] = size
    return together


def _order(rank: int, axes: Sequence[int]) -> list[int]:
    """The axes with those that are indexed first."""
    return [*axes, *(axis for axis in range(rank) if axis not in axes)]


def _transposed(c: Context, value: ov.Output, order: Sequence[int]) -> ov.Output:
    if list(order) == sorted(order):
        return value
    return c.op("transpose", value, c.ints(*order))


@translates(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(c: Context, node: Node, self: Node, indices: Sequence[Node | None]) -> Any:
    """`x[i, :, j]` with tensors for i and j: their common axes are where theirs was if they are neighbours, else in front."""
    found = _spread(c, self, indices)
    axes = [axis for axis, *_ in found]
    if len(found) == 1:
        return c.op("gather", c.value(self), found[0][1], c.constant(axes[0], torch.int64))
    parts = [c.op("unsqueeze", part, c.constant(-1, torch.int64)) for part in _together(c, found)]
    source = _transposed(c, c.value(self), _order(traced(self).dim(), axes))
    made = c.op("gather_nd", source, c.op("concat", parts, -1), 0)
    first, count = axes[0], len(axes)
    if first == 0 or axes != list(range(first, first + count)):
        return made
    common = traced(node).dim() - (traced(self).dim() - count)
    before = range(common, common + first)
    return c.op(
        "transpose", made, c.ints(*before, *range(common), *range(common + first, traced(node).dim()))
    )


@translates(aten.index_put.default)
def index_put(c: Context, node: Node, self: Node, indices: Sequence[Node | None], values: Node,
              accumulate: bool = False) -> Any:  # fmt: skip
    """`x[i, :, j] = values`, or `+=`."""
    dtype, rank = traced(node).dtype, traced(self).dim()
    target, written = c.tensor(self, dtype), c.tensor(values, dtype)
    first = indices[0]
    if len(indices) == 1 and first is not None and traced(first).dtype == torch.bool and traced(values).dim() == 0 \
            and not accumulate:  # fmt: skip
        return c.op("select", _to_rank(c, c.value(first), traced(first).dim(), rank), written, target)
    found = _spread(c, self, indices)
    axes = [axis for axis, *_ in found]
    order = _order(rank, axes)
    parts = [c.op("unsqueeze", part, c.constant(-1, torch.int64)) for part in _together(c, found)]
    places = parts[0] if len(parts) == 1 else c.op("concat", parts, -1)
    source = _transposed(c, target, order)
    wanted = _as_picked(c, written, source, places, axes, _index_rank(indices))
    made = c.op("scatter_nd_update", source, places, wanted, "sum" if accumulate else "none")
    inverse = sorted(range(rank), key=order.__getitem__)
    return _transposed(c, made, inverse)


def _index_rank(indices: Sequence[Node | None]) -> int:
    """How many axes the picked elements have in the place of those that are indexed."""
    given = [traced(index) for index in indices if index is not None]
    return max(1 if fake.dtype == torch.bool else fake.dim() for fake in given)


def _as_picked(c: Context, written: ov.Output, source: ov.Output, places: ov.Output, axes: Sequence[int],
               common: int) -> ov.Output:  # fmt: skip
    """Values in the shape that `x[i, :, j]` has, the axes of the indices first.

    Args:
        c: The context.
        written: The values, up to broadcasting in the shape that torch gives the picked elements.
        source: x, the axes that are indexed first.
        places: What `ScatterNDUpdate` takes for indices.
        axes: Which axes are indexed.
        common: How many axes the indices have.
    """
    begin, end, one = c.ints(0), c.ints(torch.iinfo(torch.int64).max), c.ints(1)
    shape, places_shape = (c.op("shape_of", value, output_type="i64") for value in (source, places))
    picked = c.op("slice", places_shape, begin, c.ints(-1), one)
    first, count = axes[0], len(axes)
    if list(axes) != list(range(first, first + count)):
        first = 0
    middle = c.ints(count + first)
    parts = [c.op("slice", shape, c.ints(count), middle, one), picked, c.op("slice", shape, middle, end, one)]
    wanted = c.op(
        "broadcast", written, c.op("concat", parts if first else parts[1:], 0), broadcast_spec="NUMPY"
    )
    kept = source.get_partial_shape().rank.get_length() - count
    order = [*range(first, first + common), *range(first), *range(first + common, common + kept)]
    return _transposed(c, wanted, order)


def _to_rank(c: Context, value: ov.Output, have: int, rank: int) -> ov.Output:
    """A value with new axes behind it."""
    return c.op("unsqueeze", value, c.ints(*range(have, rank))) if rank > have else value


@translates(aten.index_select.default)
def index_select(c: Context, node: Node, self: Node, dim: int, index: Node) -> Any:
    """Slices of an axis."""
    del node
    axis = dim % max(traced(self).dim(), 1)
    return c.op("gather", c.value(self), c.tensor(index, torch.int64), c.constant(axis, torch.int64))


@translates(aten.unfold.default)
def unfold(c: Context, node: Node, self: Node, dimension: int, size: int, step: int) -> Any:
    """Windows of an axis, each along a new last axis."""
    rank = traced(self).dim()
    if not rank:
        return c.op("broadcast", c.value(self), c.ints(size))
    axis = dimension % rank
    count = c.scalar(traced(node).shape[axis])
    starts = c.op("range", c.constant(0, torch.int64), c.op("multiply", count, c.constant(step, torch.int64)),
                  c.constant(step, torch.int64), "i64")  # fmt: skip
    places = c.op("add", c.op("unsqueeze", starts, c.constant(1, torch.int64)), c.ints(*range(size)))
    made = c.op("gather", c.value(self), places, c.constant(axis, torch.int64))
    return _transposed(c, made, [*range(axis + 1), *range(axis + 2, rank + 1), axis + 1])


@translates(aten.gather.default)
def gather(c: Context, node: Node, self: Node, dim: int, index: Node, *, sparse_grad: bool = False) -> Any:
    """Elements along an axis, one per index; the index may be smaller along the other axes."""
    del node, sparse_grad
    rank = traced(self).dim()
    if rank == 0 or traced(index).dim() == 0:
        raise ValueError(f"gather of scalars: {self.name}")
    value = c.value(self)
    axis = dim % rank
    have, asked = dims(self), dims(index)
    for other in range(rank):
        if other != axis and have[other] != asked[other]:
            end = c.sizes([traced(index).shape[other]])
            value = c.op("slice", value, c.ints(0), end, c.ints(1), c.ints(other))
    return c.op("gather_elements", value, c.tensor(index, torch.int64), axis)


@translates(aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def scatter(
    c: Context, node: Node, self: Node, dim: int, index: Node, src: Any = None, *, value: Any = None
) -> Any:
    """Elements put at, or added to, places of an axis."""
    dtype, rank = traced(node).dtype, traced(self).dim()
    if rank == 0:
        raise ValueError(f"scatter into a scalar: {self.name}")
    content = value if src is None else src
    places = c.tensor(index, torch.int64)
    if isinstance(content, Node) and traced(content).dim():
        updates = c.tensor(content, dtype)
        for axis, (have, asked) in enumerate(zip(dims(content), dims(index), strict=True)):
            if have != asked:
                end = c.sizes([traced(index).shape[axis]])
                updates = c.op("slice", updates, c.ints(0), end, c.ints(1), c.ints(axis))
    else:
        updates = c.op("broadcast", c.tensor(content, dtype), c.op("shape_of", places, output_type="i64"))
    adds = node.target is aten.scatter_add.default
    return c.op("scatter_elements_update", c.tensor(self, dtype), places, updates,
                c.constant(dim % rank, torch.int64), "sum" if adds else "none")  # fmt: skip


@translates(aten.index_copy.default)
def index_copy(c: Context, node: Node, self: Node, dim: int, index: Node, source: Node) -> Any:
    """Slices put at places of an axis, as a static cache takes up new tokens."""
    dtype, rank = traced(node).dtype, traced(self).dim()
    if rank == 0:
        return c.op("reshape", c.tensor(source, dtype), c.constant([], torch.int64), False)
    axis = c.constant(dim % rank, torch.int64)
    places = c.op("reshape", positions(c, self, dim % rank, index), c.ints(-1), False)
    return c.op("scatter_update", c.tensor(self, dtype), places, c.tensor(source, dtype), axis)
