"""Scaled dot product attention."""

from __future__ import annotations

from typing import Any

import openvino as ov
import torch

from polyport_dynamo.lowering.facts import dims, may_be_infinite, traced
from polyport_openvino.context import Context
from polyport_openvino.ops.table import translates

aten = torch.ops.aten
Node = torch.fx.Node


@translates(
    aten.scaled_dot_product_attention.default, when=lambda node: not (len(node.args) > 4 and node.args[4])
)
def attention(c: Context, node: Node, query: Node, key: Node, value: Node, attn_mask: Node | None = None,
              dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
              enable_gqa: bool = False) -> Any:  # fmt: skip
    """softmax(scale q k^T + mask) v as one operator, which the CPU computes block by block.

    Where a query may attend to nothing, which left padding makes, torch gives zeros.
    """
    del dropout_p  # see the condition
    dtype = traced(node).dtype
    q, k, v = (c.tensor(part, dtype) for part in (query, key, value))
    if enable_gqa:
        k, v = _repeated(c, k, query, key), _repeated(c, v, query, value)
    if attn_mask is None:
        inputs = [q, k, v] if scale is None else [q, k, v, c.constant(0, dtype)]
        attends = None
    else:
        mask, attends = _masked(c, attn_mask, dtype)
        inputs = [q, k, v, mask]
    if scale is not None:
        inputs.append(c.tensor(scale, dtype))
    made = c.op("scaled_dot_product_attention", *inputs, causal=bool(is_causal))
    if attends is None:
        return made
    # a product, since the CPU's selection takes longer: 3 to 6 % of a token, for 30 layers
    return c.op("multiply", made, attends)


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
