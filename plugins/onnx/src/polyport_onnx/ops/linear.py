"""Matrix products and normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from polyport_dynamo.lowering.facts import dims, traced
from polyport_onnx.context import Context
from polyport_onnx.ops.shape import transposed
from polyport_onnx.ops.table import translates
from polyport_onnx.torch_internals import onnx_dtype

aten = torch.ops.aten
Node = torch.fx.Node


@translates(aten.linear.default)
def linear(c: Context, node: Node, source: Node, weight: Node, bias: Node | None = None) -> Any:
    """The affine map x W^T + b.

    A matrix x makes one `Gemm`; otherwise the weight is transposed, once for all of its uses, which the runtime does
    when it loads the model.
    """
    del node
    value, matrix = c.value(source), c.value(weight)
    if traced(weight).dim() != 2 or traced(source).dim() == 0:
        return NotImplemented
    if traced(source).dim() == 2:
        return c.emit.op("Gemm", value, matrix, None if bias is None else c.value(bias), transB=1)
    product = c.emit.op("MatMul", value, transposed(c, matrix, [1, 0]))
    return product if bias is None else c.emit.op("Add", product, c.value(bias))


@translates(aten.matmul.default, aten.mm.default, aten.bmm.default)
def matmul(c: Context, node: Node, self: Node, other: Node) -> Any:
    """Matrix product with numpy's rules."""
    dtype = traced(node).dtype
    if not dtype.is_floating_point:
        return NotImplemented
    return c.emit.op("MatMul", c.tensor(self, dtype), c.tensor(other, dtype))


@translates(aten.addmm.default)
def addmm(
    c: Context, node: Node, self: Node, mat1: Node, mat2: Node, *, beta: float = 1, alpha: float = 1
) -> Any:
    """A matrix product plus a matrix or a row."""
    if not traced(node).dtype.is_floating_point:
        return NotImplemented
    return c.emit.op(
        "Gemm", c.value(mat1), c.value(mat2), c.value(self), beta=float(beta), alpha=float(alpha)
    )


@translates(aten.layer_norm.default)
def layer_norm(c: Context, node: Node, source: Node, normalized_shape: Sequence[int], weight: Node | None = None,
               bias: Node | None = None, eps: float = 1e-5, cudnn_enable: bool = True) -> Any:  # fmt: skip
    """Layer normalisation over the last axes."""
    del cudnn_enable
    dtype = traced(node).dtype
    shape = [dim for dim in dims(source)[-len(normalized_shape) :] if isinstance(dim, int)]
    if weight is None and len(shape) != len(normalized_shape):
        return NotImplemented
    scale = c.tensor(weight, dtype) if weight is not None else _ones(c, shape, dtype)
    shift = None if bias is None else c.tensor(bias, dtype)
    return c.emit.op("LayerNormalization", c.tensor(source, dtype), scale, shift, axis=-len(normalized_shape),
                     epsilon=float(eps))  # fmt: skip


def _ones(c: Context, shape: Sequence[int], dtype: torch.dtype) -> ir.Value:
    return c.emit.op("Expand", c.tensor(1, dtype), c.emit.ints(*shape))


@translates(aten.batch_norm.default)
def batch_norm(c: Context, node: Node, source: Node, weight: Node | None, bias: Node | None, running_mean: Node | None,
               running_var: Node | None, training: bool, momentum: float, eps: float, cudnn_enabled: bool) -> Any:  # fmt: skip
    """Batch normalisation with running statistics, as in evaluation mode.

    torchlib knows the decomposed operator only, whose results for training do not exist in ONNX.
    """
    del momentum, cudnn_enabled
    channels = dims(source)[1] if traced(source).dim() > 1 else None
    if training or running_mean is None or running_var is None or not isinstance(channels, int):
        return NotImplemented
    dtype = traced(node).dtype
    scale = (
        c.emit.constant([1.0] * channels, onnx_dtype(dtype)) if weight is None else c.tensor(weight, dtype)
    )
    shift = c.emit.constant([0.0] * channels, onnx_dtype(dtype)) if bias is None else c.tensor(bias, dtype)
    return c.emit.op("BatchNormalization", c.tensor(source, dtype), scale, shift, c.tensor(running_mean, dtype),
                     c.tensor(running_var, dtype), epsilon=float(eps))  # fmt: skip
