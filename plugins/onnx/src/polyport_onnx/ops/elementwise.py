"""Element by element operators, reductions and conversions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from polyport_dynamo.lowering.facts import common_dtype, traced
from polyport_onnx.context import Context
from polyport_onnx.ops.table import translates
from polyport_onnx.torch_internals import onnx_dtype

aten = torch.ops.aten
Node = torch.fx.Node


def _type_of(node: Node) -> torch.dtype:
    return traced(node).dtype


def _binary(c: Context, op_type: str, dtype: torch.dtype, left: Any, right: Any) -> ir.Value:
    return c.emit.op(op_type, c.tensor(left, dtype), c.tensor(right, dtype))


@translates(
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar, aten.rsub.Tensor
)
def add(c: Context, node: Node, self: Any, other: Any, alpha: Any = 1) -> Any:
    """Sum or difference, `other` scaled by `alpha`."""
    dtype, name = _type_of(node), node.target._schema.name  # type: ignore[union-attr]
    if dtype == torch.bool:
        return NotImplemented
    left, right = c.tensor(self, dtype), c.tensor(other, dtype)
    if name == "aten::rsub":
        left, right = right, left
        if alpha != 1:
            right = c.emit.op("Mul", right, c.tensor(alpha, dtype))
    elif alpha != 1:
        right = c.emit.op("Mul", right, c.tensor(alpha, dtype))
    return c.emit.op("Add" if name == "aten::add" else "Sub", left, right)


@translates(aten.mul.Tensor, aten.mul.Scalar)
def mul(c: Context, node: Node, self: Any, other: Any) -> Any:
    """Product; of booleans it is their conjunction."""
    dtype = _type_of(node)
    return _binary(c, "And" if dtype == torch.bool else "Mul", dtype, self, other)


@translates(aten.div.Tensor, aten.div.Scalar)
def div(c: Context, node: Node, self: Any, other: Any) -> Any:
    """True division: integers become floats first."""
    return _binary(c, "Div", _type_of(node), self, other)


@translates(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar)
def power(c: Context, node: Node, self: Any, exponent: Any) -> Any:
    """Power."""
    return _binary(c, "Pow", _type_of(node), self, exponent)


@translates(aten.maximum.default, aten.minimum.default)
def extremum(c: Context, node: Node, self: Any, other: Any) -> Any:
    """The larger or smaller of two."""
    if _type_of(node) == torch.bool:
        return NotImplemented
    return _binary(c, "Max" if node.target is aten.maximum.default else "Min", _type_of(node), self, other)


_COMPARISONS = {
    "eq": "Equal",
    "lt": "Less",
    "le": "LessOrEqual",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
    "ne": "Equal",
}
_ORDERED = {"lt", "le", "gt", "ge"}


@translates(*(getattr(getattr(aten, name), kind) for name in _COMPARISONS for kind in ("Tensor", "Scalar")))
def compare(c: Context, node: Node, self: Any, other: Any) -> Any:
    """A comparison in the common type of both sides: `ids > 0.5` compares floats."""
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    dtype = common_dtype(self, other)
    if dtype == torch.bool and name in _ORDERED:
        dtype = torch.int64  # ONNX orders numbers only.
    made = c.emit.op(
        _COMPARISONS[name], c.tensor(self, dtype), c.tensor(other, dtype), dtype=ir.DataType.BOOL
    )
    return c.emit.op("Not", made) if name == "ne" else made


@translates(
    *(getattr(getattr(aten, name), kind) for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__")
      for kind in ("Tensor", "Scalar")),
    aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default,
)  # fmt: skip
def bits(c: Context, node: Node, self: Any, other: Any) -> Any:
    """And, or, exclusive or; bit by bit for integers."""
    kind = node.target._schema.name.strip("_").rsplit("_", 1)[-1].rsplit("::", 1)[-1].strip("_")  # type: ignore[union-attr]
    dtype = _type_of(node)
    op_type = kind.capitalize()
    return _binary(c, op_type if dtype == torch.bool else f"Bitwise{op_type}", dtype, self, other)


@translates(aten.bitwise_not.default, aten.logical_not.default)
def invert(c: Context, node: Node, self: Node) -> Any:
    """Negation of truth values, complement of integers."""
    if node.target is aten.logical_not.default:
        return c.emit.op("Not", c.tensor(self, torch.bool))
    return c.emit.op("Not" if _type_of(node) == torch.bool else "BitwiseNot", c.value(self))


_UNARY = {
    "neg": "Neg", "abs": "Abs", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "sin": "Sin", "cos": "Cos", "tanh": "Tanh",
    "sigmoid": "Sigmoid", "relu": "Relu", "reciprocal": "Reciprocal", "floor": "Floor", "ceil": "Ceil", "erf": "Erf",
}  # fmt: skip


@translates(*(getattr(aten, name).default for name in _UNARY))
def unary(c: Context, node: Node, self: Node) -> Any:
    """Functions of one argument; those with real results take integers as floats."""
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    if name in ("floor", "ceil") and not _type_of(node).is_floating_point:
        return c.value(self)
    return c.emit.op(_UNARY[name], c.tensor(self, _type_of(node)))


@translates(aten.rsqrt.default)
def rsqrt(c: Context, node: Node, self: Node) -> Any:
    """The reciprocal of the square root."""
    return c.emit.op("Reciprocal", c.emit.op("Sqrt", c.tensor(self, _type_of(node))))


@translates(aten.silu.default)
def silu(c: Context, node: Node, self: Node) -> Any:
    """X * sigmoid(x)."""
    del node
    return c.emit.op("Mul", c.value(self), c.emit.op("Sigmoid", c.value(self)))


@translates(aten.gelu.default)
def gelu(c: Context, node: Node, self: Node, approximate: str = "none") -> Any:
    """`Gelu` exists from opset 20 on; before that torchlib spells it out."""
    del node
    if c.emit.opset_version < 20:
        return NotImplemented
    return c.emit.op("Gelu", c.value(self), approximate=approximate)


@translates(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(c: Context, node: Node, condition: Node, self: Any, other: Any) -> Any:
    """A choice element by element."""
    dtype = _type_of(node)
    return c.emit.op("Where", c.tensor(condition, torch.bool), c.tensor(self, dtype), c.tensor(other, dtype),
                     dtype=onnx_dtype(dtype))  # fmt: skip


@translates(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(c: Context, node: Node, self: Node, mask: Node, value: Any) -> Any:
    """`value` where the mask holds. A value beyond the range of the type becomes infinite, as in torch."""
    dtype = _type_of(node)
    return c.emit.op(
        "Where", c.value(mask), c.tensor(value, dtype), c.tensor(self, dtype), dtype=onnx_dtype(dtype)
    )


@translates(aten._softmax.default, aten.softmax.int, aten.log_softmax.int, aten._log_softmax.default)
def softmax(c: Context, node: Node, self: Node, dim: int, dtype: Any = None) -> Any:
    """Softmax along one axis; with `dtype`, computed in that type."""
    del dtype  # The traced result has it.
    op_type = "LogSoftmax" if "log" in node.target._schema.name else "Softmax"  # type: ignore[union-attr]
    return c.emit.op(op_type, c.tensor(self, _type_of(node)), axis=dim)


@translates(aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default)
def reduce(c: Context, node: Node, self: Node, dim: Sequence[int] | None = None, keepdim: bool = False, *,
           dtype: Any = None) -> Any:  # fmt: skip
    """Mean, sum, maximum or minimum over axes."""
    del dtype
    if traced(self).dim() == 0 or _type_of(node) == torch.bool:
        return NotImplemented
    kind = node.target._schema.name.removeprefix("aten::").removeprefix("a")  # type: ignore[union-attr]
    axes = c.emit.ints(*dim) if dim else None
    return c.emit.op(
        f"Reduce{kind.capitalize()}", c.tensor(self, _type_of(node)), axes, keepdims=int(keepdim)
    )


@translates(
    aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default, aten.type_as.default,
    aten.contiguous.default, aten.clone.default, aten.detach.default, aten.detach_.default, aten.alias.default,
    aten.lift_fresh.default, aten.lift_fresh_copy.default,
)  # fmt: skip
def convert(c: Context, node: Node, self: Node, *args: Any, **kwargs: Any) -> Any:
    """Conversions and copies: a `Cast` where the type changes, and nothing where it does not."""
    del args, kwargs
    return c.tensor(self, _type_of(node))


@translates(aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default)
def dropout(c: Context, node: Node, source: Node, p: float, train: bool) -> Any:
    """Nothing, in evaluation mode."""
    del node
    return NotImplemented if train and p else c.value(source)


@translates(aten.copy.default, aten.fill.Scalar, aten.fill.Tensor)
def overwrite(c: Context, node: Node, self: Node, src: Any = None, *args: Any, value: Any = None) -> Any:
    """The value of `self` after it was overwritten: in shape and type itself, in content the other."""
    del args
    content = c.tensor(value if src is None else src, _type_of(node))
    return c.emit.op("Expand", content, c.emit.op("Shape", c.value(self), dtype=ir.DataType.INT64))
