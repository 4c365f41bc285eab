"""Arithmetic on sizes, which are scalars."""

from __future__ import annotations

import math
import operator
from typing import Any

import openvino as ov
import torch

from polyport_openvino.context import Context, floor_divide
from polyport_openvino.ops.table import translates

aten = torch.ops.aten
Node = torch.fx.Node


@translates(aten.sym_size.int)
def sym_size(c: Context, node: Node, self: Node, dim: int) -> Any:
    """The length of one axis."""
    del node
    return c.axis_size(c.value(self), dim % self.meta["val"].dim())


@translates(aten.sym_numel.default)
def sym_numel(c: Context, node: Node, self: Node) -> Any:
    """The number of elements."""
    del node
    shape = c.op("shape_of", c.value(self), output_type="i64")
    return c.op("reduce_prod", shape, c.constant(0, torch.int64), False)


@translates(aten.item.default, aten._local_scalar_dense.default)
def item(c: Context, node: Node, self: Node) -> Any:
    """The only element of a tensor."""
    made = c.op("reshape", c.value(self), c.constant([], torch.int64), False)
    return c.cast(made, torch.int64) if _is_int(node) else made


def _is_int(arg: Any) -> bool:
    value = arg.meta.get("val") if isinstance(arg, Node) else arg
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _operands(c: Context, *args: Any) -> list[ov.Output]:
    """Operands in one form: int64 if all are integers, otherwise float (or boolean)."""
    if all(_is_int(arg) for arg in args):
        return [c.scalar(arg) for arg in args]
    values = [c.scalar(arg) if _is_int(arg) else c.tensor(arg) for arg in args]
    if all(value.get_element_type() == ov.Type.boolean for value in values):
        return values
    return [c.cast(value, torch.float32) for value in values]


def _binary(name: str) -> Any:
    def translate(c: Context, node: Node, a: Any, b: Any) -> Any:
        del node
        return c.op(name, *_operands(c, a, b))

    translate.__name__ = name
    return translate


for _name, _targets in {
    "add": (operator.add,), "subtract": (operator.sub,), "multiply": (operator.mul,), "maximum": (torch.sym_max,),
    "minimum": (torch.sym_min,), "logical_and": (operator.and_,), "logical_or": (operator.or_,),
    "equal": (operator.eq,), "not_equal": (operator.ne,), "less": (operator.lt,), "less_equal": (operator.le,),
    "greater": (operator.gt,), "greater_equal": (operator.ge,), "floor_mod": (operator.mod,),
}.items():  # fmt: skip
    translates(*_targets)(_binary(_name))


@translates(operator.floordiv)
def floor_division(c: Context, node: Node, a: Any, b: Any) -> Any:
    """Division that rounds down."""
    del node
    left, right = _operands(c, a, b)
    if not (_is_int(a) and _is_int(b)):
        return c.op("floor", c.op("divide", left, right))
    return floor_divide(c, left, right)


@translates(operator.truediv, torch.sym_sqrt)
def true_divide(c: Context, node: Node, a: Any, b: Any = None) -> Any:
    """Division and square root leave the integers."""
    del node
    if b is None:
        return c.op("sqrt", c.cast(c.tensor(a), torch.float32))
    return c.op("divide", *(c.cast(c.tensor(x), torch.float32) for x in (a, b)))


@translates(operator.pow)
def power(c: Context, node: Node, a: Any, b: Any) -> Any:
    """Power; square roots and small whole exponents are exact."""
    del node
    if isinstance(b, (int, float)) and (exact := c.power(_operands(c, a)[0], float(b))) is not None:
        return exact
    return c.op("power", *_operands(c, a, b))


@translates(operator.neg)
def negate(c: Context, node: Node, a: Any) -> Any:
    """Unary minus."""
    del node
    return c.op("negative", _operands(c, a)[0])


@translates(torch.sym_sum)
def sym_sum(c: Context, node: Node, args: Any) -> Any:
    """A sum of sizes."""
    del node
    total, *others = _operands(c, *args)
    for other in others:
        total = c.op("add", total, other)
    return total


@translates(torch.sym_float)
def sym_float(c: Context, node: Node, a: Any) -> Any:
    """A size as a float."""
    del node
    return c.cast(c.tensor(a), torch.float32)


@translates(math.floor, math.ceil, math.trunc, torch.sym_int, round)
def to_int(c: Context, node: Node, a: Any) -> Any:
    """A float as a size."""
    if _is_int(a):
        return c.scalar(a)
    roundings: dict[Any, str] = {math.floor: "floor", math.ceil: "ceiling"}
    value = c.tensor(a)
    if node.target is round:
        value = c.op("round", value, "half_to_even")
    elif node.target in roundings:
        value = c.op(roundings[node.target], value)
    return c.cast(value, torch.int64)


@translates(torch.sym_not)
def sym_not(c: Context, node: Node, a: Any) -> Any:
    """Logical negation."""
    del node
    return c.op("logical_not", c.tensor(a))


@translates(torch.sym_ite)
def sym_ite(c: Context, node: Node, b: Any, t: Any, f: Any) -> Any:
    """A choice between two sizes."""
    del node
    return c.op("select", c.tensor(b), *_operands(c, t, f))
