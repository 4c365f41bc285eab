"""Sorting, the largest elements and their places, sums along an axis, and counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import torch

from polyport_dynamo.lowering.facts import dims, traced
from polyport_openvino.context import Context
from polyport_openvino.ops.table import translates

aten = torch.ops.aten
Node = torch.fx.Node


def _best(c: Context, self: Node, count: Any, dim: int, largest: bool) -> list[ov.Output]:
    """The first elements of an axis in order, and their places. Equal elements stay in theirs."""
    fake = traced(self)
    value = c.tensor(self, torch.int32 if fake.dtype == torch.bool else fake.dtype)
    if not fake.dim():
        return [value, c.constant(0, torch.int64)]
    node = ov.opset15.topk(
        value, c.scalar(count), dim % fake.dim(), "max" if largest else "min", "value", "i64", stable=True
    )
    return [c.tensor(node.output(0), fake.dtype), node.output(1)]


@translates(aten.topk.default)
def topk(
    c: Context,
    node: Node,
    self: Node,
    k: Any,
    dim: int = -1,
    largest: bool = True,
    *rest: Any,
    **options: Any,
) -> Any:
    """The k largest or smallest, in order even where torch need not sort them."""
    del node, rest, options
    return _best(c, self, k, dim, largest)


@translates(aten.sort.default, aten.sort.stable)
def sort(
    c: Context, node: Node, self: Node, dim: int = -1, descending: bool = False, *, stable: bool = True
) -> Any:
    """All elements of an axis in order."""
    del node, stable
    return _best(c, self, _length(self, dim), dim, descending)


@translates(aten.argsort.default, aten.argsort.stable)
def argsort(
    c: Context, node: Node, self: Node, dim: int = -1, descending: bool = False, *, stable: bool = True
) -> Any:
    """The places of the elements of an axis in order."""
    del node, stable
    return _best(c, self, _length(self, dim), dim, descending)[1]


def _length(self: Node, dim: int) -> Any:
    return traced(self).shape[dim] if traced(self).dim() else 1


@translates(aten.max.dim, aten.min.dim)
def extremum_along(c: Context, node: Node, self: Node, dim: int, keepdim: bool = False) -> Any:
    """The largest or smallest element of an axis and its place."""
    made = _best(c, self, 1, dim, node.target is aten.max.dim)
    if keepdim or not traced(self).dim():
        return made
    axis = c.constant(dim % traced(self).dim(), torch.int64)
    return [c.op("squeeze", part, axis) for part in made]


@translates(aten.argmax.default, aten.argmin.default)
def place_of_extremum(
    c: Context, node: Node, self: Node, dim: int | None = None, keepdim: bool = False
) -> Any:
    """Where the largest or smallest element is; without an axis, its place among all elements."""
    fake = traced(self)
    if not fake.dim():
        return c.constant(0, torch.int64)
    value = c.tensor(self, torch.int32 if fake.dtype == torch.bool else fake.dtype)
    axis = 0 if dim is None else dim % fake.dim()
    if dim is None:
        value = c.op("reshape", value, c.ints(-1), False)
    mode = "max" if node.target is aten.argmax.default else "min"
    made = ov.opset15.topk(value, c.constant(1, torch.int64), axis, mode, "value", "i64", stable=True).output(
        1
    )
    if dim is None:
        return c.op("reshape", made, c.ints(*[1] * (fake.dim() if keepdim else 0)), False)
    return made if keepdim else c.op("squeeze", made, c.constant(axis, torch.int64))


@translates(aten.cumsum.default)
def cumsum(c: Context, node: Node, self: Node, dim: int, *, dtype: Any = None) -> Any:
    """Sums of all elements up to each."""
    del dtype  # the traced result has it
    value = c.tensor(self, traced(node).dtype)
    if not traced(self).dim():
        return value
    return c.op("cum_sum", value, c.constant(dim % traced(self).dim(), torch.int64))


def _has_bounds(node: Node) -> bool:
    """Without bounds, or with equal ones, they are the smallest and the largest element."""
    bins, *bounds = node.args[1:] or [None]
    low, high = bounds if len(bounds) == 2 else (0, 0)
    return (
        isinstance(bins, int)
        and isinstance(low, (int, float))
        and isinstance(high, (int, float))
        and low < high
    )


@translates(aten.histc.default, when=_has_bounds)
def histc(c: Context, node: Node, self: Node, bins: int, low: float, high: float) -> Any:
    """How many elements there are in each of `bins` equal parts of a range; those outside of it count nowhere."""
    dtype = traced(node).dtype
    value = c.op("reshape", c.tensor(self, torch.float32), c.ints(-1, 1), False)
    part = c.op("divide", c.op("multiply", c.op("subtract", value, c.tensor(float(low))), c.tensor(float(bins))),
                c.tensor(float(high - low)))  # fmt: skip
    # the last part includes its upper bound
    part = c.op(
        "select", c.op("equal", value, c.tensor(float(high))), c.tensor(float(bins - 1)), c.op("floor", part)
    )
    hits = c.op("equal", part, c.constant(np.arange(bins), torch.float32))
    return c.op("reduce_sum", c.cast(hits, dtype), c.ints(0), False)


@translates(aten.tril.default, aten.triu.default)
def triangle(c: Context, node: Node, self: Node, diagonal: Any = 0) -> Any:
    """The elements on one side of a diagonal, and zeros."""
    dtype = traced(node).dtype
    rows, columns = (
        c.op("unsqueeze", _counted(c, self, axis), c.constant(other, torch.int64))
        for axis, other in ((-2, 1), (-1, 0))
    )
    edge = c.op("add", rows, c.scalar(diagonal))
    kept = c.op("less_equal" if node.target is aten.tril.default else "greater_equal", columns, edge)
    return c.op("select", kept, c.tensor(self, dtype), c.constant(0, dtype))


def _counted(c: Context, tensor: Node, axis: int) -> ov.Output:
    """The positions of an axis."""

    def make() -> ov.Output:
        end = c.scalar(traced(tensor).shape[axis])
        return c.op("range", c.constant(0, torch.int64), end, c.constant(1, torch.int64), "i64")

    return c.once(("counted", dims(tensor)[axis]), make)
