"""Scaled dot product attention."""

from __future__ import annotations

from typing import Any

import openvino as ov
import torch

from polyport_openvino.context import Context, dims, traced
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
    dtype = traced(node).dtype
    q, k, v = (c.tensor(part, dtype) for part in (query, key, value))
    if enable_gqa:
        k, v = _repeated(c, k, query, key), _repeated(c, v, query, value)
    inputs = [q, k, v]
    attends = None
    if attn_mask is not None:
        is_bool = traced(attn_mask).dtype == torch.bool
        mask = c.tensor(attn_mask, None if is_bool else dtype)
        inputs.append(mask)
        if is_bool:
            attends = c.once(
                ("attends", attn_mask), lambda: c.op("reduce_logical_or", mask, c.ints(-1), True)
            )
    if scale is not None:
        if attn_mask is None:
            inputs.append(c.constant(0, dtype))
        inputs.append(c.tensor(scale, dtype))
    made = c.op("scaled_dot_product_attention", *inputs, causal=bool(is_causal))
    if attends is None:
        return made
    return c.op("select", attends, made, c.constant(0, dtype))


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
