"""Element by element operators, reductions and conversions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polyport_dynamo.lowering.facts import common_dtype, traced
from polyport_openvino.context import Context
from polyport_openvino.ops.table import translates

aten = torch.ops.aten
Node = torch.fx.Node


def name_of(node: Node) -> str:
    """`add` of `aten.add.Tensor`."""
    schema = node.target._schema  # type: ignore[union-attr]
    return str(schema.name.partition("::")[2])


def _type_of(node: Node) -> torch.dtype:
    return traced(node).dtype


def _is_bool(node: Node) -> bool:
    return _type_of(node) == torch.bool


def _binary(c: Context, name: str, dtype: torch.dtype, left: Any, right: Any) -> Any:
    return c.op(name, c.tensor(left, dtype), c.tensor(right, dtype))


@translates(
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar, aten.rsub.Tensor
)
def add(c: Context, node: Node, self: Any, other: Any, alpha: Any = 1) -> Any:
    """Sum or difference, `other` scaled by `alpha`; of booleans the sum is their disjunction."""
    dtype, name = _type_of(node), name_of(node)
    left, right = c.tensor(self, dtype), c.tensor(other, dtype)
    if dtype == torch.bool:
        return c.op("logical_or", left, right)
    if name == "rsub":
        left, right = right, left
    if alpha != 1:
        right = c.op("multiply", right, c.tensor(alpha, dtype))
    return c.op("add" if name == "add" else "subtract", left, right)


@translates(aten.mul.Tensor, aten.mul.Scalar)
def mul(c: Context, node: Node, self: Any, other: Any) -> Any:
    """Product; of booleans it is their conjunction."""
    return _binary(c, "logical_and" if _is_bool(node) else "multiply", _type_of(node), self, other)


@translates(aten.div.Tensor, aten.div.Scalar)
def div(c: Context, node: Node, self: Any, other: Any) -> Any:
    """True division: integers become floats first."""
    return _binary(c, "divide", _type_of(node), self, other)


@translates(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar)
def power(c: Context, node: Node, self: Any, exponent: Any) -> Any:
    """Power."""
    if exponent == 2 and isinstance(self, Node):
        value = c.tensor(self, _type_of(node))
        return c.op("multiply", value, value)
    return _binary(c, "power", _type_of(node), self, exponent)


@translates(aten.maximum.default, aten.minimum.default)
def extremum(c: Context, node: Node, self: Any, other: Any) -> Any:
    """The larger or smaller of two."""
    largest = node.target is aten.maximum.default
    names = ("logical_or", "logical_and") if _is_bool(node) else ("maximum", "minimum")
    return _binary(c, names[0 if largest else 1], _type_of(node), self, other)


#: `a > b` is written `b < a`: `Greater` and `GreaterEqual` of the CPU hold where one side is NaN, and `Less` is right.
_COMPARISONS = {
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "less",
    "ge": "less_equal",
}


@translates(*(getattr(getattr(aten, name), kind) for name in _COMPARISONS for kind in ("Tensor", "Scalar")))
def compare(c: Context, node: Node, self: Any, other: Any) -> Any:
    """A comparison in the common type of both sides: `ids > 0.5` compares floats."""
    dtype = common_dtype(self, other)
    if dtype == torch.bool:
        dtype = torch.int32
    name = name_of(node)
    sides = (other, self) if name in ("gt", "ge") else (self, other)
    return _binary(c, _COMPARISONS[name], dtype, *sides)


@translates(
    *(getattr(getattr(aten, name), kind) for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__")
      for kind in ("Tensor", "Scalar")),
    aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default,
)  # fmt: skip
def bits(c: Context, node: Node, self: Any, other: Any) -> Any:
    """And, or, exclusive or; bit by bit for integers."""
    kind = name_of(node).strip("_").rpartition("_")[2]
    return _binary(c, f"{'logical' if _is_bool(node) else 'bitwise'}_{kind}", _type_of(node), self, other)


@translates(aten.bitwise_not.default, aten.logical_not.default)
def invert(c: Context, node: Node, self: Node) -> Any:
    """Negation of truth values, complement of integers."""
    if _is_bool(node):
        return c.op("logical_not", c.tensor(self, torch.bool))
    return c.op("bitwise_not", c.value(self))


_UNARY = {
    "neg": "negative", "abs": "abs", "exp": "exp", "log": "log", "sqrt": "sqrt", "sin": "sin", "cos": "cos", "tanh": "tanh",
    "sigmoid": "sigmoid", "relu": "relu", "floor": "floor", "ceil": "ceiling", "erf": "erf", "sign": "sign",
}  # fmt: skip


@translates(*(getattr(aten, name).default for name in _UNARY))
def unary(c: Context, node: Node, self: Node) -> Any:
    """Functions of one argument; those with real results take integers as floats."""
    name = name_of(node)
    if name in ("floor", "ceil") and not _type_of(node).is_floating_point:
        return c.value(self)
    return c.op(_UNARY[name], c.tensor(self, _type_of(node)))


@translates(aten.silu.default)
def silu(c: Context, node: Node, self: Node) -> Any:
    """The value times its sigmoid."""
    dtype = _type_of(node)
    return c.op("swish", c.tensor(self, dtype), c.constant(1, dtype))


@translates(aten.rsqrt.default, aten.reciprocal.default)
def inverse(c: Context, node: Node, self: Node) -> Any:
    """One over the value, or over its square root."""
    dtype = _type_of(node)
    value = c.tensor(self, dtype)
    if node.target is aten.rsqrt.default:
        value = c.op("sqrt", value)
    return c.op("divide", c.constant(1, dtype), value)


@translates(aten.gelu.default)
def gelu(c: Context, node: Node, self: Node, approximate: str = "none") -> Any:
    """The Gaussian error linear unit, exact or by the hyperbolic tangent."""
    del node
    return c.op("gelu", c.value(self), "tanh" if approximate == "tanh" else "erf")


@translates(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(c: Context, node: Node, condition: Node, self: Any, other: Any) -> Any:
    """A choice element by element."""
    dtype = _type_of(node)
    return c.op("select", c.tensor(condition, torch.bool), c.tensor(self, dtype), c.tensor(other, dtype))


@translates(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(c: Context, node: Node, self: Node, mask: Node, value: Any) -> Any:
    """`value` where the mask holds."""
    dtype = _type_of(node)
    return c.op("select", c.tensor(mask, torch.bool), c.tensor(value, dtype), c.tensor(self, dtype))


@translates(aten._softmax.default, aten.softmax.int, aten.log_softmax.int, aten._log_softmax.default)
def softmax(c: Context, node: Node, self: Node, dim: int, dtype: Any = None) -> Any:
    """Softmax along one axis; with `dtype`, computed in that type."""
    del dtype  # the traced result has it
    axis = dim % max(traced(self).dim(), 1)
    return c.op("log_softmax" if "log" in name_of(node) else "softmax", c.tensor(self, _type_of(node)), axis)


_REDUCTIONS = {"mean": "mean", "sum": "sum", "amax": "max", "amin": "min", "max": "max", "min": "min"}


@translates(aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.mean.default, aten.sum.default,
            aten.max.default, aten.min.default)  # fmt: skip
def reduce(c: Context, node: Node, self: Node, dim: Sequence[int] | None = None, keepdim: bool = False, *,
           dtype: Any = None) -> Any:  # fmt: skip
    """Mean, sum, maximum or minimum over axes."""
    del dtype
    rank = traced(self).dim()
    value = c.tensor(self, _type_of(node))
    if not rank:
        return value
    axes = c.ints(*(axis % rank for axis in (dim or range(rank))))
    return c.op(f"reduce_{_REDUCTIONS[name_of(node)]}", value, axes, keepdim)


@translates(aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims)
def truth(c: Context, node: Node, self: Node, dim: Any = None, keepdim: bool = False) -> Any:
    """Whether any or all of the elements are true."""
    rank = traced(self).dim()
    value = c.tensor(self, torch.bool)
    if not rank:
        return value
    asked = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
    kind = "or" if name_of(node) == "any" else "and"
    return c.op(f"reduce_logical_{kind}", value, c.ints(*(axis % rank for axis in asked)), keepdim)


@translates(
    aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default, aten.type_as.default,
    aten.contiguous.default, aten.clone.default, aten.detach.default, aten.detach_.default, aten.alias.default,
    aten.lift_fresh.default, aten.lift_fresh_copy.default,
)  # fmt: skip
def convert(c: Context, node: Node, self: Node, *args: Any, **kwargs: Any) -> Any:
    """Conversions and copies: a `Convert` where the type changes, and nothing where it does not."""
    del args, kwargs
    return c.tensor(self, _type_of(node))


@translates(aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default)
def dropout(c: Context, node: Node, source: Node, p: float, train: bool) -> Any:
    """Nothing, in evaluation mode."""
    if train and p:
        raise ValueError(f"{node.name} drops values at random: export in evaluation mode")
    return c.value(source)


@translates(aten.copy.default, aten.fill.Scalar, aten.fill.Tensor)
def overwrite(c: Context, node: Node, self: Node, src: Any = None, *args: Any, value: Any = None) -> Any:
    """The value of `self` after it was overwritten: in shape and type itself, in content the other."""
    del args
    content = c.tensor(value if src is None else src, _type_of(node))
    return c.op("broadcast", content, c.op("shape_of", c.value(self), output_type="i64"))
