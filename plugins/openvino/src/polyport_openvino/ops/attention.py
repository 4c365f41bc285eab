"""Scaled dot product attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino.utils.node_factory import NodeFactory

from polyport_dynamo.lowering.facts import dims, may_be_infinite, traced
from polyport_dynamo.lowering.heads import shared_heads
from polyport_openvino.context import Context
from polyport_openvino.ops.table import translates

#: Far below every score, and far above those that a mask takes away, in float16 too.
_SINK = -3e4

#: Makes operators with inputs that the functions of an opset don't take: a sink.
_OPSET = NodeFactory("opset13")

aten = torch.ops.aten
Node = torch.fx.Node


@translates(
    aten.scaled_dot_product_attention.default, when=lambda node: not (len(node.args) > 4 and node.args[4])
)
def attention(c: Context, node: Node, query: Node, key: Node, value: Node, attn_mask: Node | None = None,
              dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
              enable_gqa: bool = False) -> Any:  # fmt: skip
    """softmax(scale q k^T + mask) v as one operator, which the CPU computes block by block.

    Where a query may attend to nothing, which left padding makes, torch gives zeros. Behind a boolean mask a sink does the same:
    one more score, to which nothing else is lost.
    """
    del dropout_p  # see the condition
    dtype = traced(node).dtype
    q, k, v = (c.tensor(part, dtype) for part in (query, key, value))
    mask, attends = (None, None) if attn_mask is None else _masked(c, attn_mask, dtype)
    shared = None if is_causal else _shared(c, query, key, value, attn_mask, enable_gqa)
    if shared is not None:
        k, v = (c.tensor(part, dtype) for part in shared)
        q, mask = _grouped(c, q, mask, attn_mask, query, shared[0])
    elif enable_gqa:
        k, v = _repeated(c, k, query, key), _repeated(c, v, query, value)
    sinks = attn_mask is not None and _takes_sink(c, query, attn_mask)
    inputs = [q, k, v] if mask is None else [q, k, v, mask]
    if scale is not None or sinks:
        inputs += [c.constant(0, dtype)] if mask is None else []
        inputs.append(c.tensor(dims(query)[-1] ** -0.5 if scale is None else scale, dtype))
    if sinks:
        inputs.append(_sink(c, dims(query if shared is None else shared[0])[1], dtype))
    made = _OPSET.create("ScaledDotProductAttention", inputs, {"causal": bool(is_causal)}).output(0)
    if shared is not None:
        made = c.op("reshape", made, c.ints(0, dims(query)[1], -1, dims(value)[-1]), True)
    if attends is None or sinks:
        return made
    # a product, since the CPU's selection takes longer: 3 to 6 % of a token, for 30 layers
    return c.op("multiply", made, attends)


def _takes_sink(c: Context, query: Node, mask: Node) -> bool:
    """Whether a sink stands for what a boolean mask leaves nothing of.

    For the attention on a cache in variables it takes no time, and a product with zeros and ones is one more operator in each
    layer: 3 % of a token. Outside of variables it keeps the CPU from fusing the attention.
    """
    sizes = dims(query)
    known = len(sizes) == 4 and isinstance(sizes[1], int) and isinstance(sizes[3], int)
    return c.stateful and known and traced(mask).dtype == torch.bool


def _sink(c: Context, heads: int, dtype: torch.dtype) -> ov.Output:
    """A score that wins where a mask leaves nothing, for every head."""
    return c.once(("sink", heads, dtype), lambda: c.constant(np.full((1, heads, 1, 1), _SINK), dtype))


def _masked(c: Context, mask: Node, dtype: torch.dtype) -> tuple[ov.Output, ov.Output | None]:
    """A mask as the operator takes it, and 1 for queries that may attend to something, 0 for others; None where all may."""
    if traced(mask).dtype == torch.bool:
        value = c.tensor(mask)
        # the CPU's attention reads a boolean mask slowly: 0.9 s in place of 0.3 s for 30 layers and 400 tokens
        zero, lowest = c.constant(0, dtype), c.constant(torch.finfo(dtype).min, dtype)
        penalty = c.once(("penalty", mask, dtype), lambda: c.op("select", value, zero, lowest))
        return penalty, c.once(
            ("attends", mask, dtype),
            lambda: c.cast(c.op("reduce_logical_or", value, c.ints(-1), True), dtype),
        )
    added = c.tensor(mask, dtype)
    if not may_be_infinite(mask, c.inputs):
        return added, None
    lowest = c.constant(torch.finfo(dtype).min, dtype)

    def attends() -> ov.Output:
        # not by the maximum: that of the CPU is never less than the smallest finite number
        return c.cast(c.op("reduce_logical_or", c.op("less_equal", lowest, added), c.ints(-1), True), dtype)

    bounded = c.once(("bounded", mask, dtype), lambda: c.op("maximum", added, lowest))
    return bounded, c.once(("attends", mask, dtype), attends)


def _shared(
    c: Context, query: Node, key: Node, value: Node, mask: Node | None, enable_gqa: bool
) -> tuple[Node, Node] | None:
    """Keys and values whose heads several heads of queries share, where they are better left as they are; else None.

    In the caches that become variables heads have to be repeated in the graph: the fusion of the CPU looks for that, and then
    repeats nothing.
    """
    shared = shared_heads(query, key, value, enable_gqa)
    if shared is None or (c.stateful and any(_grows(c, part) for part in shared)):
        return None
    # a mask must be one for all heads, with a row per query or one for all
    fits = mask is None or (traced(mask).dim() == 4 and dims(mask)[1] == 1)
    return shared if fits and all(isinstance(dims(part)[-1], int) for part in (query, value)) else None


def _grows(c: Context, node: Node) -> bool:
    """Whether a value is a cache with new tokens behind it."""
    return node.target is aten.cat.default and any(part in c.inputs for part in node.args[0])  # type: ignore[union-attr]


def _grouped(
    c: Context, q: ov.Output, mask: ov.Output | None, masked: Node | None, query: Node, key: Node
) -> tuple[ov.Output, ov.Output | None]:
    """Queries whose heads share one head of keys, one after the other in its rows, and the mask for them."""
    heads, fewer = dims(query)[1], dims(key)[1]
    rows = c.op("reshape", q, c.ints(0, fewer, -1, dims(query)[-1]), True)
    if mask is None or masked is None or dims(masked)[2] == 1:
        return rows, mask
    several = [mask] * (heads // fewer)
    return rows, c.once(("rows", masked, heads // fewer), lambda: c.op("concat", several, 2))


def _repeated(c: Context, value: ov.Output, query: Node, node: Node) -> ov.Output:
    """Give every query head its own copy of the head it shares with others, in the form that runtimes see through."""
    heads, fewer = dims(query)[-3], dims(node)[-3]
    if heads == fewer:
        return value
    shape = traced(node).shape
    repeats = heads // fewer
    spread = c.op("unsqueeze", value, c.constant(2, torch.int64))
    wide = c.sizes([1, 1, repeats, 1, 1])
    spread = c.op("broadcast", spread, wide, broadcast_spec="BIDIRECTIONAL")
    return c.op("reshape", spread, c.sizes([0, heads, -1, shape[-1]]), True)
