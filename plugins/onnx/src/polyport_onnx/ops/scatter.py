"""Writing into a tensor at given places."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from polyport_dynamo.lowering.facts import dims, traced
from polyport_onnx.context import Context
from polyport_onnx.ops.table import translates

aten = torch.ops.aten
Node = torch.fx.Node


@translates(aten.index_copy.default)
def index_copy(c: Context, node: Node, self: Node, dim: int, index: Node, source: Node) -> Any:
    """Slices put at the given positions of an axis, as a static cache takes up new tokens.

    `ScatterND`, with the axes before `dim` spelled out in the indices: its updates are then whole rows of memory, and
    nothing is transposed. For a new token in 60 buffers of `[1, 3, 512, 64]` (30 layers), bound in place, ONNX Runtime 1.32
    takes 0.06 ms; for `ScatterElements` 0.19 ms (at 256 tokens 0.5 ms and 8 ms), for `TensorScatter`, which would need
    opset 24, 0.02 ms.
    """
    del node
    rank = traced(self).dim()
    if rank == 0 or traced(index).dim() != 1 or traced(source).dim() != rank:
        return NotImplemented
    axis = dim % rank
    positions = _along(c, c.tensor(index, torch.int64), axis, axis + 1)
    if axis == 0:
        return c.emit.op("ScatterND", c.value(self), positions, c.value(source))
    shape = c.sizes([*traced(source).shape[: axis + 1], 1])
    grids = [
        c.emit.op("Expand", _along(c, _counted(c, self, before), before, axis + 1), shape)
        for before in range(axis)
    ]
    indices = c.emit.concat([*grids, c.emit.op("Expand", positions, shape)], -1)
    return c.emit.op("ScatterND", c.value(self), indices, c.value(source))


def _counted(c: Context, tensor: Node, axis: int) -> ir.Value:
    """The positions of an axis."""
    size = dims(tensor)[axis]
    if isinstance(size, int):
        return c.emit.constant(np.arange(size), ir.DataType.INT64)
    ends = (c.emit.constant(0, ir.DataType.INT64), c.emit.squeeze(c.size(traced(tensor).shape[axis])))
    return c.emit.op("Range", *ends, c.emit.constant(1, ir.DataType.INT64))


def _along(c: Context, vector: ir.Value, axis: int, rank: int) -> ir.Value:
    """A vector that varies along one of `rank` axes, with one more axis behind them."""
    return c.emit.op("Reshape", vector, c.emit.ints(*(-1 if i == axis else 1 for i in range(rank)), 1))
