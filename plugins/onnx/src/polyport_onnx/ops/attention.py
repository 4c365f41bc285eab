"""Scaled dot product attention.

torchlib's translation squares the cost of the mask (a search for NaN over all scores) or, in earlier versions, gives NaN
for queries that may attend to nothing, which left padding makes. torch gives zeros. Here masked scores get the smallest
finite number, so that softmax stays defined, and the rows of such queries are set to zero in the (smaller) result; which
rows those are is computed once for all layers.
Reported as https://github.com/microsoft/onnxscript/issues/2479.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from polyport_dynamo.lowering.facts import dims, may_be_infinite, symbolic, traced
from polyport_dynamo.lowering.heads import shared_heads
from polyport_onnx.context import Context
from polyport_onnx.ops.shape import transposed
from polyport_onnx.ops.table import translates
from polyport_onnx.torch_internals import onnx_dtype

aten = torch.ops.aten
Node = torch.fx.Node


@translates(aten.scaled_dot_product_attention.default)
def attention(c: Context, node: Node, query: Node, key: Node, value: Node, attn_mask: Node | None = None,
              dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
              enable_gqa: bool = False) -> Any:  # fmt: skip
    """softmax(scale q k^T + mask) v, in plain operators that runtimes fuse."""
    width = dims(query)[-1]
    if dropout_p or not isinstance(width, int) or isinstance(scale, Node):
        return NotImplemented
    dtype = traced(node).dtype
    q, k, v = c.value(query), c.value(key), c.value(value)
    shared = shared_heads(query, key, value, enable_gqa)
    if shared is not None:
        k, v = c.value(shared[0]), c.value(shared[1])
    elif enable_gqa:
        k, v = _repeat_heads(c, k, query, key), _repeat_heads(c, v, query, value)
    rank = traced(key).dim()
    q = c.emit.op("Mul", q, c.tensor(1 / math.sqrt(width) if scale is None else scale, dtype))
    scores = _product(c, q, transposed(c, k, [*range(rank - 2), rank - 1, rank - 2]), query, shared)
    attends = None
    if is_causal:
        allowed = _causal(c, traced(query).shape[-2], traced(key).shape[-2])
        scores = c.emit.op("Add", scores, _penalty(c, allowed, dtype))
    elif attn_mask is not None and traced(attn_mask).dtype == torch.bool:
        allowed = c.value(attn_mask)
        scores = c.emit.op("Add", scores, _penalty(c, allowed, dtype))
        number = c.emit.cast(allowed, ir.DataType.INT32)
        attends = c.emit.cast(c.emit.op("ReduceMax", number, c.emit.ints(-1), keepdims=1), ir.DataType.BOOL)
    elif attn_mask is not None:
        mask = c.tensor(attn_mask, dtype)
        if may_be_infinite(attn_mask, c.user_inputs):
            lowest = c.tensor(torch.finfo(dtype).min, dtype)
            best = c.emit.op("ReduceMax", mask, c.emit.ints(-1), keepdims=1)
            attends = c.emit.op("Not", c.emit.op("Less", best, lowest, dtype=ir.DataType.BOOL))
            mask = c.emit.op("Max", mask, lowest)
        scores = c.emit.op("Add", scores, mask)
    result = _product(c, c.emit.op("Softmax", scores, axis=-1), v, query, shared)
    if attends is None:
        return result
    return c.emit.op("Where", attends, result, c.tensor(0.0, dtype), dtype=onnx_dtype(dtype))


def _penalty(c: Context, allowed: ir.Value, dtype: torch.dtype) -> ir.Value:
    """0 where a key may be seen, the smallest finite number elsewhere."""
    zero, lowest = c.tensor(0.0, dtype), c.tensor(torch.finfo(dtype).min, dtype)
    return c.emit.op("Where", allowed, zero, lowest, dtype=onnx_dtype(dtype))


def _causal(c: Context, queries: Any, keys: Any) -> ir.Value:
    """A boolean lower triangle, queries by keys."""
    zero, one = c.tensor(0), c.tensor(1)
    rows, columns = (
        c.emit.op("Range", zero, c.emit.squeeze(c.size(length)), one) for length in (queries, keys)
    )
    rows = c.emit.op("Unsqueeze", rows, c.emit.ints(1))
    return c.emit.op("GreaterOrEqual", rows, columns, dtype=ir.DataType.BOOL)


def _product(
    c: Context, left: ir.Value, right: ir.Value, query: Node, shared: tuple[Node, Node] | None
) -> ir.Value:
    """A product of `[batch, heads, queries, x]` and the matrix that each head has, or shares with others.

    The rows of heads that share one are put together in one matrix, which needs no other order in memory.
    """
    if shared is None:
        return c.emit.op("MatMul", left, right)
    heads, fewer, length = dims(query)[1], dims(shared[0])[1], traced(query).shape[2]
    grouped = c.emit.op("Reshape", left, c.sizes([0, fewer, heads // fewer * length, -1]))
    return c.emit.op("Reshape", c.emit.op("MatMul", grouped, right), c.sizes([0, heads, length, -1]))


def _repeat_heads(c: Context, value: ir.Value, query: Node, node: Node) -> ir.Value:
    """Give every query head its own copy of the key or value head it shares with others."""
    wanted, shape = dims(query)[-3], traced(node).shape
    have = symbolic(shape[-3])
    if wanted == have:
        return value
    repeats = wanted // have
    rank = len(shape)
    spread = c.emit.op("Unsqueeze", value, c.emit.ints(rank - 2))
    spread = c.emit.op("Expand", spread, c.emit.ints(*[1] * (rank - 2), repeats, 1, 1))
    # 0 copies a dimension of the input by position, which the new axis shifts for all but the first ones.
    sizes = [*shape[:-3], wanted, shape[-2], shape[-1]]
    plan = [0 if index < rank - 3 else size for index, size in enumerate(sizes)]
    plan[-2] = -1
    return c.emit.op("Reshape", spread, c.sizes(plan))
