"""Matrix products and normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polyport_dynamo.lowering.facts import dims, traced
from polyport_openvino.context import Context
from polyport_openvino.ops.table import translates

aten = torch.ops.aten
Node = torch.fx.Node


def _is_float(node: Node) -> bool:
    return traced(node).dtype.is_floating_point


@translates(aten.linear.default, when=_is_float)
def linear(c: Context, node: Node, source: Node, weight: Node, bias: Node | None = None) -> Any:
    """The affine map x W^T + b; the weight is read as it lies."""
    dtype = traced(node).dtype
    product = c.op("matmul", c.tensor(source, dtype), c.tensor(weight, dtype), False, True)
    return product if bias is None else c.op("add", product, c.tensor(bias, dtype))


@translates(aten.matmul.default, aten.mm.default, aten.bmm.default, when=_is_float)
def matmul(c: Context, node: Node, self: Node, other: Node) -> Any:
    """Matrix product with numpy's rules."""
    dtype = traced(node).dtype
    return c.op("matmul", c.tensor(self, dtype), c.tensor(other, dtype), False, False)


@translates(aten.addmm.default, aten.baddbmm.default, when=_is_float)
def addmm(
    c: Context, node: Node, self: Node, mat1: Node, mat2: Node, *, beta: float = 1, alpha: float = 1
) -> Any:
    """A matrix product plus a matrix or a row."""
    dtype = traced(node).dtype
    product = c.op("matmul", c.tensor(mat1, dtype), c.tensor(mat2, dtype), False, False)
    parts = [(c.tensor(self, dtype), beta), (product, alpha)]
    return c.op(
        "add",
        *(part if scale == 1 else c.op("multiply", part, c.tensor(scale, dtype)) for part, scale in parts),
    )


@translates(aten.layer_norm.default)
def layer_norm(c: Context, node: Node, source: Node, normalized_shape: Sequence[int], weight: Node | None = None,
               bias: Node | None = None, eps: float = 1e-5, cudnn_enable: bool = True) -> Any:  # fmt: skip
    """Layer normalisation over the last axes."""
    del cudnn_enable
    dtype = traced(node).dtype
    axes = c.ints(*range(-len(normalized_shape), 0))
    made = c.op("mvn", c.tensor(source, dtype), axes, True, float(eps), "inside_sqrt")
    return _affine(c, made, weight, bias, dtype)


def _affine(c: Context, value: Any, weight: Node | None, bias: Node | None, dtype: torch.dtype) -> Any:
    if weight is not None:
        value = c.op("multiply", value, c.tensor(weight, dtype))
    return value if bias is None else c.op("add", value, c.tensor(bias, dtype))


@translates(aten.rms_norm.default)
def rms_norm(c: Context, node: Node, source: Node, normalized_shape: Sequence[int], weight: Node | None = None,
             eps: float | None = None) -> Any:  # fmt: skip
    """Division by the root of the mean square."""
    dtype = traced(node).dtype
    value = c.tensor(source, dtype)
    squares = c.op(
        "reduce_mean", c.op("multiply", value, value), c.ints(*range(-len(normalized_shape), 0)), True
    )
    epsilon = torch.finfo(dtype).eps if eps is None else eps
    root = c.op("sqrt", c.op("add", squares, c.constant(epsilon, dtype)))
    return _affine(
        c, c.op("multiply", value, c.op("divide", c.constant(1, dtype), root)), weight, None, dtype
    )


@translates(aten.batch_norm.default, when=lambda node: not node.args[5] and None not in node.args[3:5])
def batch_norm(c: Context, node: Node, source: Node, weight: Node | None, bias: Node | None, running_mean: Node,
               running_var: Node, training: bool, momentum: float, eps: float, cudnn_enabled: bool) -> Any:  # fmt: skip
    """Batch normalisation with running statistics, as in evaluation mode."""
    del training, momentum, cudnn_enabled
    dtype, channels = traced(node).dtype, dims(source)[1]
    ones, zeros = ((c.constant([number] * channels, dtype)) for number in (1, 0))
    scale = ones if weight is None else c.tensor(weight, dtype)
    shift = zeros if bias is None else c.tensor(bias, dtype)
    return c.op("batch_norm_inference", c.tensor(source, dtype), scale, shift, c.tensor(running_mean, dtype),
                c.tensor(running_var, dtype), float(eps))  # fmt: skip


@translates(aten.group_norm.default)
def group_norm(c: Context, node: Node, source: Node, num_groups: int, weight: Node | None = None, bias: Node | None = None,
               eps: float = 1e-5, cudnn_enabled: bool = True) -> Any:  # fmt: skip
    """Normalisation of groups of channels."""
    del cudnn_enabled
    dtype, channels = traced(node).dtype, dims(source)[1]
    ones, zeros = ((c.constant([number] * channels, dtype)) for number in (1, 0))
    return c.op("group_normalization", c.tensor(source, dtype), ones if weight is None else c.tensor(weight, dtype),
                zeros if bias is None else c.tensor(bias, dtype), num_groups, float(eps))  # fmt: skip
