"""Arithmetic on sizes. Integers are vectors of one element (see `Context`), floats and booleans scalars."""

from __future__ import annotations

import math
import operator
from typing import Any

import onnx_ir as ir
import torch

from polyport_onnx.context import Context
from polyport_onnx.ops.table import translates

aten = torch.ops.aten


@translates(aten.sym_size.int)
def sym_size(c: Context, node: torch.fx.Node, self: torch.fx.Node, dim: int) -> Any:
    """The length of one axis."""
    del node
    return c.axis_size(c.value(self), dim % self.meta["val"].dim())


@translates(aten.sym_numel.default)
def sym_numel(c: Context, node: torch.fx.Node, self: torch.fx.Node) -> Any:
    """The number of elements."""
    del node
    return c.emit.op("Reshape", c.emit.op("Size", c.value(self), dtype=ir.DataType.INT64), c.emit.ints(1))


@translates(aten.item.default, aten._local_scalar_dense.default)
def item(c: Context, node: torch.fx.Node, self: torch.fx.Node) -> Any:
    """The only element of a tensor, as a size where it is an integer."""
    value = c.value(self)
    if _is_int(node):
        return c.emit.op("Reshape", c.emit.cast(value, ir.DataType.INT64), c.emit.ints(1))
    made = c.emit.op("Reshape", value, c.emit.ints())
    return made if made.dtype == ir.DataType.BOOL else c.emit.cast(made, ir.DataType.FLOAT)


def _is_int(arg: Any) -> bool:
    value = arg.meta.get("val") if isinstance(arg, torch.fx.Node) else arg
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _operands(c: Context, *args: Any) -> list[ir.Value]:
    """Operands in one form: vectors of int64 if all are integers, otherwise float scalars (or booleans)."""
    if all(_is_int(arg) for arg in args):
        return [c.size(arg) for arg in args]
    values = [c.emit.squeeze(c.size(arg)) if _is_int(arg) else c.tensor(arg) for arg in args]
    if all(value.dtype == ir.DataType.BOOL for value in values):
        return values
    return [c.emit.cast(value, ir.DataType.FLOAT) for value in values]


def _binary(op_type: str, *, compares: bool = False) -> Any:
    def translate(c: Context, node: torch.fx.Node, a: Any, b: Any) -> Any:
        del node
        left, right = _operands(c, a, b)
        made = c.emit.op(op_type, left, right, dtype=ir.DataType.BOOL if compares else left.dtype)
        return c.emit.squeeze(made) if compares and _is_int(a) and _is_int(b) else made

    translate.__name__ = op_type
    return translate


for _op_type, _targets in {
    "Add": (operator.add,), "Sub": (operator.sub,), "Mul": (operator.mul,), "Max": (torch.sym_max,), "Min": (torch.sym_min,),
    "And": (operator.and_,), "Or": (operator.or_,), "Pow": (operator.pow,),
}.items():  # fmt: skip
    translates(*_targets)(_binary(_op_type))
for _op_type, _target in {
    "Equal": operator.eq, "Less": operator.lt, "LessOrEqual": operator.le, "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
}.items():  # fmt: skip
    translates(_target)(_binary(_op_type, compares=True))


@translates(operator.ne)
def not_equal(c: Context, node: torch.fx.Node, a: Any, b: Any) -> Any:
    """ONNX has no such operator."""
    del node
    left, right = _operands(c, a, b)
    made = c.emit.op("Not", c.emit.op("Equal", left, right, dtype=ir.DataType.BOOL))
    return c.emit.squeeze(made) if _is_int(a) and _is_int(b) else made


@translates(operator.mod)
def modulo(c: Context, node: torch.fx.Node, a: Any, b: Any) -> Any:
    """ONNX `Mod` of integers has the sign of the divisor, as Python's has."""
    if not (_is_int(a) and _is_int(b)):
        return NotImplemented
    del node
    return c.emit.op("Mod", *_operands(c, a, b))


@translates(operator.floordiv)
def floor_divide(c: Context, node: torch.fx.Node, a: Any, b: Any) -> Any:
    """Division that rounds down, as in Python; ONNX `Div` truncates towards zero.

    `-(-a // b)`, a common way to round up, has a negative operand, so the remainder goes off first.
    """
    del node
    left, right = _operands(c, a, b)
    if not (_is_int(a) and _is_int(b)):
        return c.emit.op("Floor", c.emit.op("Div", left, right))
    return c.emit.op("Div", c.emit.op("Sub", left, c.emit.op("Mod", left, right)), right)


@translates(operator.truediv, torch.sym_sqrt)
def true_divide(c: Context, node: torch.fx.Node, a: Any, b: Any = None) -> Any:
    """Division and square root leave the integers."""
    del node
    if b is None:
        return c.emit.op("Sqrt", c.emit.cast(c.tensor(a), ir.DataType.FLOAT))
    left, right = (c.emit.cast(c.tensor(x), ir.DataType.FLOAT) for x in (a, b))
    return c.emit.op("Div", left, right)


@translates(operator.neg)
def negate(c: Context, node: torch.fx.Node, a: Any) -> Any:
    """Unary minus."""
    del node
    return c.emit.op("Neg", _operands(c, a)[0])


@translates(torch.sym_sum)
def sym_sum(c: Context, node: torch.fx.Node, args: Any) -> Any:
    """A sum of sizes."""
    del node
    total, *others = _operands(c, *args)
    for other in others:
        total = c.emit.op("Add", total, other)
    return total


@translates(torch.sym_float)
def sym_float(c: Context, node: torch.fx.Node, a: Any) -> Any:
    """A size as a float."""
    del node
    return c.emit.cast(c.tensor(a), ir.DataType.FLOAT)


@translates(math.floor, math.ceil, math.trunc, torch.sym_int, round)
def to_int(c: Context, node: torch.fx.Node, a: Any) -> Any:
    """A float as a size."""
    if _is_int(a):
        return c.size(a)
    roundings: dict[Any, str] = {math.floor: "Floor", math.ceil: "Ceil", round: "Round"}
    rounding = roundings.get(node.target)
    value = c.tensor(a) if rounding is None else c.emit.op(rounding, c.tensor(a))
    return c.emit.op("Reshape", c.emit.cast(value, ir.DataType.INT64), c.emit.ints(1))


@translates(torch.sym_not)
def sym_not(c: Context, node: torch.fx.Node, a: Any) -> Any:
    """Logical negation."""
    del node
    return c.emit.op("Not", c.tensor(a))


@translates(torch.sym_ite)
def sym_ite(c: Context, node: torch.fx.Node, b: Any, t: Any, f: Any) -> Any:
    """A choice between two sizes."""
    del node
    yes, no = _operands(c, t, f)
    return c.emit.op("Where", c.tensor(b), yes, no, dtype=yes.dtype)
