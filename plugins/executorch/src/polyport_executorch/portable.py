"""Operators that ExecuTorch's own kernels don't compute, written in those that they do, whatever the device."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, cast

import torch

from polyport_dynamo.lowering.facts import dims, traced
from polyport_executorch.building import Builder, arguments

Node = torch.fx.Node
aten = torch.ops.aten

#: Where a slice ends that takes all there is.
_END = 2**63 - 1


def rewrite(builder: Builder) -> None:
    """Rewrite a graph for ExecuTorch's kernels.

    Args:
        builder: Of a functional graph, which is changed.
    """
    builder.replace(lambda node: _RULES.get(str(node.target), _of_weights))


def rewritten() -> set[str]:
    """Names of the operators that are written in others, without their overloads."""
    return {"::".join(target.split(".")[:2]) for target in _RULES}


def is_copy(node: Node) -> bool:
    """Whether a node is a copy of a value: in a functional graph nobody can tell them apart."""
    if node.op != "call_function" or str(node.target) not in COPIES:
        return False
    given = arguments(node)
    return not given.get("train") and bool(traced(given_to(node)).dtype == traced(node).dtype)


def given_to(node: Node) -> Node:
    """What a copy is made of."""
    return cast("Node", node.args[0])


def _same(b: Builder, node: Node) -> Node | None:
    del b
    # what the program returns must have memory of its own
    kept = any(user.op == "output" for user in node.users)
    return given_to(node) if is_copy(node) and not kept else None


def _grouped(b: Builder, node: Node) -> Node | None:
    """Rows `offs[i - 1]` to `offs[i]` of the input times matrix i; zeros for rows after the last group.

    The runtime has no sizes that depend on values, so each matrix meets all rows, and those of other groups are set to zero.
    """
    source, weight, *rest = node.args
    ends = rest[0] if rest else node.kwargs.get("offs")
    if not isinstance(source, Node) or not isinstance(weight, Node) or not isinstance(ends, Node):
        return None
    groups = dims(weight)[0]
    if traced(source).dim() != 2 or traced(weight).dim() != 3 or not isinstance(groups, int):
        return None
    row = b.op(aten.unsqueeze.default, b.op(aten.arange.default, b.size(source, 0)), 1)
    zero = b.number(0.0, traced(node).dtype)
    made, earlier = None, None
    for index in range(groups):
        before = b.op(aten.lt.Tensor, row, b.op(aten.slice.Tensor, ends, 0, index, index + 1))
        mine = before if earlier is None else b.op(aten.logical_and.default, before, earlier)
        earlier = b.op(aten.logical_not.default, before)
        product = b.op(aten.linear.default, source, b.piece(weight, index, turned=True))
        part = b.op(aten.where.self, mine, product, zero)
        made = part if made is None else b.op(aten.add.Tensor, made, part)
    return made


def _convolution(b: Builder, node: Node) -> Node | None:
    """A convolution along three axes: the sum of one along two of them for each place of the kernel on the first.

    What lies along the first axis goes into the batch.
    """
    given = arguments(node)
    source, weight = given["input"], given["weight"]
    if traced(source).dim() != 5 or given.get("transposed"):
        return None
    stride, padding, dilation = (_three(given[name]) for name in ("stride", "padding", "dilation"))
    if stride is None or padding is None or dilation is None or not isinstance(dims(weight)[2], int):
        return None
    if padding[0]:
        source = b.op(aten.constant_pad_nd.default, source, [0, 0, 0, 0, padding[0], padding[0]])
    taps, length = dims(weight)[2], None
    batch, parts = b.size(source, 0), []
    for tap in range(taps):
        # what the taps behind this one still have to meet
        end = (tap + 1 - taps) * dilation[0] or _END
        cut = b.op(aten.slice.Tensor, source, 2, tap * dilation[0], end, stride[0])
        length = b.size(cut, 2) if length is None else length
        rows = b.op(aten.permute.default, cut, [0, 2, 1, 3, 4])
        shape = [b.times(batch, length), *(b.size(source, axis) for axis in (1, 3, 4))]
        rows = b.op(aten.reshape.default, rows, shape)
        bias = given["bias"] if tap == 0 else None
        kernel = b.piece(weight, tap, 2)
        options = (stride[1:], padding[1:], dilation[1:], given["groups"])
        parts.append(b.op(aten.conv2d.default, rows, kernel, bias, *options))
    made = functools.reduce(lambda one, other: b.op(aten.add.Tensor, one, other), parts)
    shape = [batch, length, *(b.size(made, axis) for axis in (1, 2, 3))]
    return b.op(aten.permute.default, b.op(aten.reshape.default, made, shape), [0, 2, 1, 3, 4])


def _three(value: Any) -> list[int] | None:
    if not isinstance(value, (list, tuple)) or not all(isinstance(size, int) for size in value):
        return None
    return list(value) * 3 if len(value) == 1 else list(value)


def _pad(b: Builder, node: Node) -> Node | None:
    """Sizes below zero cut: the kernel takes none."""
    given = arguments(node)
    if given.get("mode", "constant") != "constant" or not all(isinstance(size, int) for size in given["pad"]):
        return None
    pad = list(given["pad"])
    if min(pad, default=0) >= 0:
        return None
    made = given["self"]
    for index in range(0, len(pad), 2):
        axis = traced(made).dim() - 1 - index // 2
        before, after = pad[index : index + 2]
        if min(before, after) < 0:
            made = b.op(aten.slice.Tensor, made, axis, max(0, -before), min(after, 0) or _END)
    pad = [max(0, size) for size in pad]
    value = given["value"]
    return (
        b.op(aten.constant_pad_nd.default, made, pad, 0.0 if value is None else value) if any(pad) else made
    )


def _empty(b: Builder, node: Node) -> Node:
    """Memory that is written to, as zeros: ExecuTorch's form of it takes no layout, and sizes that vary become fixed in it."""
    given = arguments(node)
    dtype = traced(node).dtype
    if "size" not in given:
        return b.op(aten.full_like.default, given["self"], 0, dtype=dtype)
    return b.op(aten.full.default, given["size"], 0, dtype=dtype)


def _histogram(b: Builder, node: Node) -> Node | None:
    """How many numbers there are of each kind, where each whole number is a kind, as a router counts its tokens."""
    given = arguments(node)
    source, bins, low, high = (given[name] for name in ("self", "bins", "min", "max"))
    if traced(source).dim() != 1 or low != 0 or high != bins - 1:
        return None
    kinds = b.constant(("kinds", bins), lambda: torch.arange(bins, dtype=traced(source).dtype))
    # the last kind takes what lies on its border, all others are cut off: floor(x * bins / (bins - 1)) is x for whole x
    same = b.op(aten.eq.Tensor, b.op(aten.unsqueeze.default, source, 1), kinds)
    return b.op(aten.sum.dim_IntList, b.op(aten._to_copy.default, same, dtype=traced(node).dtype), [0])


def _buckets(b: Builder, node: Node) -> Node:
    """How many borders lie below each number."""
    given = arguments(node)
    below = aten.le.Tensor if given["right"] else aten.lt.Tensor
    lower = b.op(below, given["boundaries"], b.op(aten.unsqueeze.default, given["self"], -1))
    return b.op(
        aten.sum.dim_IntList,
        b.op(aten._to_copy.default, lower, dtype=traced(node).dtype),
        [-1],
        dtype=traced(node).dtype,
    )


def _sort(b: Builder, node: Node) -> Node | None:
    """As many of the largest as there are."""
    given = arguments(node)
    axis = given["dim"]
    if given.get("stable"):
        return None
    made = b.op(
        aten.topk.default, given["self"], b.size(given["self"], axis), axis, given["descending"], True
    )
    return b.op(operator.getitem, made, 1) if isinstance(node.meta["val"], torch.Tensor) else made


def _opened(b: Builder, node: Node) -> Node | None:
    """The same tensor with the same new axis is there already: each layer of a model makes it of what all take. ExecuTorch copies it."""
    given = arguments(node)
    first = b.first(("unsqueeze", given["self"], given["dim"]), node)
    returned = any(user.op == "output" for user in (*node.users, *first.users))
    return None if first is node or returned else first


#: Most elements of what is computed of weights at export.
_FOLDED = 2**16


def _of_weights(b: Builder, node: Node) -> Node | None:
    """What is computed of weights alone, such as `1 + weight` in a norm: a weight."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags:
        return None
    value = traced(node)
    if not isinstance(value, torch.Tensor) or any(not isinstance(size, int) for size in dims(node)):
        return None
    tensors = {source: b.content(source) for source in node.all_input_nodes}
    if not tensors or None in tensors.values() or value.numel() > _FOLDED:
        return None

    def computed() -> torch.Tensor:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda source: tensors[source])
        with torch.no_grad():
            made: torch.Tensor = target(*args, **kwargs)
        return made.contiguous()

    return b.constant(("of weights", node), computed)


#: Operators whose result has the numbers of what they are given.
COPIES = frozenset(
    f"aten.{name}"
    for name in (
        "alias.default", "clone.default", "contiguous.default", "detach.default", "dropout.default",
        "feature_dropout.default", "lift_fresh_copy.default", "to.device", "to.dtype", "to.dtype_layout", "to.other",
        "_to_copy.default", "type_as.default",
    )
)  # fmt: skip

_RULES: dict[str, Callable[[Builder, Node], Node | None]] = {
    **dict.fromkeys(COPIES, _same),
    "transformers.grouped_mm_fallback.default": _grouped,
    "aten._grouped_mm.default": _grouped,
    "aten.conv3d.default": _convolution,
    "aten.convolution.default": _convolution,
    "aten.empty.memory_format": _empty,
    "aten.empty_like.default": _empty,
    "aten.new_empty.default": _empty,
    "aten.bucketize.Tensor": _buckets,
    "aten.histc.default": _histogram,
    "aten.argsort.default": _sort,
    "aten.argsort.stable": _sort,
    "aten.sort.default": _sort,
    "aten.sort.stable": _sort,
    "aten.unsqueeze.default": _opened,
    "aten.pad.default": _pad,
    "aten.constant_pad_nd.default": _pad,
}
