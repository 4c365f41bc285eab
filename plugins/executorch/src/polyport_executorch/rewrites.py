"""Operators that XNNPACK lacks, written in those that it has: so that a layer is one delegate and its values stay inside of it.

What lies between two delegates takes memory for its largest size; inside of them XNNPACK takes what a call needs.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from polyport_dynamo.lowering.facts import dims, may_be_infinite, traced
from polyport_dynamo.lowering.heads import shared_heads
from polyport_executorch.building import Builder, Rule, arguments

Node = torch.fx.Node
aten = torch.ops.aten

#: Numbers in a constant that takes the place of moving columns: heads are narrow.
_LARGEST = 2**18


def rewrite(builder: Builder) -> None:
    """Rewrite a graph for XNNPACK.

    Args:
        builder: Of a functional graph, which is changed.
    """
    builder.replace(lambda node: _RULES.get(node.target) if _is_float(node) else None)


def _is_float(node: Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def _mean(b: Builder, value: Node) -> Node:
    """The mean over the last axis, which stays as an axis of 1: a layer with one neuron."""
    width = dims(value)[-1]
    weight = b.constant(("mean", width), lambda: torch.full((1, width), 1 / width))
    return b.op(aten.linear.default, value, weight)


def _wide(value: Node) -> bool:
    shape = dims(value)
    return traced(value).dtype == torch.float32 and len(shape) >= 2 and isinstance(shape[-1], int)


def _mean_rule(b: Builder, node: Node) -> Node | None:
    given = arguments(node)
    source = given["self"]
    last = given["dim"] in ([-1], (-1,), [traced(source).dim() - 1])
    return _mean(b, source) if last and given["keepdim"] and _wide(source) and not given["dtype"] else None


def _layer_norm(b: Builder, node: Node) -> Node | None:
    given = arguments(node)
    source = given["input"]
    if len(given["normalized_shape"]) != 1 or not _wide(source):
        return None
    centred = b.op(aten.sub.Tensor, source, _mean(b, source))
    variance = _mean(b, b.op(aten.mul.Tensor, centred, centred))
    return _scaled(b, centred, variance, given["eps"], given["weight"], given["bias"])


def _rms_norm(b: Builder, node: Node) -> Node | None:
    given = arguments(node)
    source = given["input"]
    if len(given["normalized_shape"]) != 1 or not _wide(source):
        return None
    eps = torch.finfo(torch.float32).eps if given["eps"] is None else given["eps"]
    return _scaled(b, source, _mean(b, b.op(aten.mul.Tensor, source, source)), eps, given["weight"], None)


def _scaled(
    b: Builder, value: Node, variance: Node, eps: float, weight: Node | None, bias: Node | None
) -> Node:
    made = b.op(
        aten.mul.Tensor,
        value,
        b.op(aten.rsqrt.default, b.op(aten.add.Tensor, variance, b.number(eps))),
    )
    if weight is not None:
        made = b.op(aten.mul.Tensor, made, weight)
    return made if bias is None else b.op(aten.add.Tensor, made, bias)


def _cat(b: Builder, node: Node) -> Node | None:
    """Pieces of the last axis of one tensor, some with their sign changed, put together: a product with a constant.

    Rotary embeddings turn half of a head into the other so. Each number is multiplied by 1 or -1 and added to zeros.
    """
    given = arguments(node)
    parts = given["tensors"]
    if given["dim"] not in (-1, traced(node).dim() - 1) or len(parts) < 2:
        return None
    columns: list[tuple[int, float]] = []
    whole: Node | None = None
    for part in parts:
        sign, cut = (-1.0, part.args[0]) if part.target is aten.neg.default else (1.0, part)
        found = _cut_columns(cut)
        if found is None or (whole is not None and found[0] is not whole):
            return None
        whole = found[0]
        columns += [(index, sign) for index in found[1]]
    if whole is None or traced(whole).dtype != torch.float32:
        return None
    width = dims(whole)[-1]
    if len(columns) * width > _LARGEST:
        return None

    def weight() -> torch.Tensor:
        made = torch.zeros(len(columns), width)
        for row, (column, sign) in enumerate(columns):
            made[row, column] = sign
        return made

    return b.op(aten.linear.default, whole, b.constant(("columns", width, tuple(columns)), weight))


def _cut_columns(node: Any) -> tuple[Node, range] | None:
    """What a node is cut out of along its last axis, and which of its columns it has."""
    if not isinstance(node, Node) or node.target is not aten.slice.Tensor:
        return None
    cut = arguments(node)
    whole: Node = cut["self"]
    rank, width = traced(whole).dim(), dims(whole)[-1]
    if cut["dim"] not in (-1, rank - 1) or not isinstance(width, int) or rank < 3:
        return None
    start, end, step = cut["start"] or 0, cut["end"], cut["step"]
    if not all(isinstance(number, int) for number in (start, step)) or not isinstance(end, int | None):
        return None
    return whole, range(width)[start:end:step]


def _attention(b: Builder, node: Node) -> Node | None:
    """softmax(scale q k^T + mask) v where heads that share keys lie one after the other in its rows."""
    given = arguments(node)
    query, key, value, mask = given["query"], given["key"], given["value"], given["attn_mask"]
    shared = shared_heads(query, key, value, given["enable_gqa"])
    if shared is None and given["enable_gqa"] and dims(query)[-3] != dims(key)[-3]:
        return None
    if traced(query).dim() != 4 or (mask is not None and traced(mask).dim() != 4):
        return None
    if not isinstance(dims(query)[1], int) or not isinstance(dims(query)[-1], int):
        return None
    if mask is not None and dims(mask)[1] not in ((1,) if shared else (1, dims(query)[1])):
        return None
    scale = given["scale"]
    if isinstance(scale, Node):
        return None
    scale = dims(query)[-1] ** -0.5 if scale is None else scale
    penalty, attends = (None, None) if mask is None else _masked(b, mask)
    if given["is_causal"]:
        penalty = _causal(b, query, key)
    group, asked = 1, query
    if shared is not None:
        key, value = shared
        group = dims(query)[1] // dims(key)[1]
        # asked whether a reshape is a view, torch compares sizes, and keeps the answer for this sample as a fact
        query = b.op(aten.clone.default, query, memory_format=torch.contiguous_format)
        query = b.op(
            aten.reshape.default,
            query,
            [b.size(query, 0), dims(key)[1], b.times(b.size(query, 2), group), dims(query)[-1]],
        )
        penalty, attends = (_in_rows(b, part, group) for part in (penalty, attends))
    scores = b.op(
        aten.matmul.default,
        b.op(aten.mul.Tensor, query, b.number(scale)),
        b.op(aten.transpose.int, key, -1, -2),
    )
    if penalty is not None:
        scores = b.op(aten.add.Tensor, scores, penalty)
    made = b.op(aten.matmul.default, b.op(aten._softmax.default, scores, -1, False), value)
    if attends is not None:
        made = b.op(aten.mul.Tensor, made, attends)
    if group > 1:
        made = b.op(
            aten.reshape.default,
            made,
            [b.size(asked, 0), dims(node)[1], b.size(asked, 2), dims(node)[-1]],
        )
    return made


def _in_rows(b: Builder, mask: Node | None, group: int) -> Node | None:
    """A mask for queries whose heads lie one after the other in rows."""
    if mask is None or dims(mask)[2] == 1:
        return mask
    return b.once(("rows", mask, group), mask, lambda: b.op(aten.cat.default, [mask] * group, 2))


def _causal(b: Builder, query: Node, key: Node) -> Node:
    def make() -> Node:
        rows, columns = (
            b.op(
                aten.arange.default,
                b.size(part, 2),
            )
            for part in (query, key)
        )
        kept = b.op(aten.le.Tensor, columns, b.op(aten.unsqueeze.default, rows, 1))
        four = b.op(aten.unsqueeze.default, b.op(aten.unsqueeze.default, kept, 0), 0)
        return _penalty(b, four)

    sizes = (str(dims(query)[2]), str(dims(key)[2]))
    later = max((query, key), key=lambda part: list(b.graph.nodes).index(part))
    return b.once(("causal", sizes), later, make)


def _penalty(b: Builder, kept: Node) -> Node:
    zero, lowest = b.number(0.0), b.number(torch.finfo(torch.float32).min)
    return b.op(aten.where.self, kept, zero, lowest)


def _masked(b: Builder, mask: Node) -> tuple[Node, Node | None]:
    """What is added to the scores; and 1 for queries that may attend to something, 0 for others, None where all may."""
    if traced(mask).dtype == torch.bool:
        penalty = b.once(("penalty", mask), mask, lambda: _penalty(b, mask))
        kept = mask
    elif may_be_infinite(mask, b.inputs):
        lowest = b.number(torch.finfo(torch.float32).min)
        penalty = b.once(("penalty", mask), mask, lambda: b.op(aten.maximum.default, mask, lowest))
        kept = b.once(("kept", mask), mask, lambda: b.op(aten.gt.Scalar, mask, -math.inf))
    else:
        return mask, None

    def attends() -> Node:
        some = b.op(aten.any.dim, kept, -1, True)
        return b.op(aten.where.self, some, b.number(1.0), b.number(0.0))

    return penalty, b.once(("attends", mask), penalty if penalty.next.op != "output" else mask, attends)


def _convolution(b: Builder, node: Node) -> Node | None:
    """A convolution along one axis: along two, the first of size 1.

    ExecuTorch writes it so itself, inside of the delegate, where XNNPACK can't reshape what varies in two sizes.
    """
    given = arguments(node)
    source, weight = given["input"], given["weight"]
    if traced(source).dim() != 3:
        return None
    padding = given["padding"]
    if isinstance(padding, str):
        total = given["dilation"][0] * (dims(weight)[2] - 1) if padding == "same" else 0
        if total % 2:  # the one too many is behind
            source = b.op(aten.constant_pad_nd.default, source, [0, 1])
        padding = [total // 2]

    def two(size: Any, first: int) -> list[int]:
        return [first, *(size if isinstance(size, (list, tuple)) else [size])]

    made = b.op(
        aten.convolution.default,
        b.op(aten.unsqueeze.default, source, 2),
        b.opened(weight, 2),
        given["bias"],
        two(given["stride"], 1),
        two(padding, 0),
        two(given["dilation"], 1),
        node.target is aten.conv_transpose1d.default or given.get("transposed", False),
        two(given.get("output_padding", 0), 0),
        given["groups"],
    )
    return b.op(aten.squeeze.dims, made, [2])


_RULES: dict[Any, Rule] = {
    aten.conv1d.default: _convolution,
    aten.conv1d.padding: _convolution,
    aten.conv_transpose1d.default: _convolution,
    aten.convolution.default: _convolution,
    aten.mean.dim: _mean_rule,
    aten.layer_norm.default: _layer_norm,
    aten.rms_norm.default: _rms_norm,
    aten.cat.default: _cat,
    aten.scaled_dot_product_attention.default: _attention,
}
