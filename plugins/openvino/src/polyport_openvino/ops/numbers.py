"""Integer division and remainders, bounds, and random numbers."""

from __future__ import annotations

import math
from typing import Any

import openvino as ov
import torch

from polyport_dynamo.lowering.facts import traced
from polyport_openvino.context import Context, floor_divide
from polyport_openvino.ops.table import translates

aten = torch.ops.aten
Node = torch.fx.Node


def _divided(c: Context, dtype: torch.dtype, self: Any, other: Any, rounding: str | None) -> ov.Output:
    left, right = c.tensor(self, dtype), c.tensor(other, dtype)
    if rounding is None:
        return c.op("divide", left, right)
    if not dtype.is_floating_point:
        if rounding == "floor":
            return floor_divide(c, left, right)
        return c.op("divide", c.op("subtract", left, c.op("mod", left, right)), right)
    quotient = c.op("divide", left, right)
    if rounding == "floor":
        return c.op("floor", quotient)
    return c.op("multiply", c.op("sign", quotient), c.op("floor", c.op("abs", quotient)))


@translates(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_division(c: Context, node: Node, self: Any, other: Any) -> Any:
    """Division that rounds down."""
    return _divided(c, traced(node).dtype, self, other, "floor")


@translates(aten.div.Tensor_mode, aten.div.Scalar_mode)
def divide(c: Context, node: Node, self: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    """Division that rounds down, towards zero, or not at all."""
    return _divided(c, traced(node).dtype, self, other, rounding_mode)


@translates(aten.remainder.Scalar, aten.remainder.Tensor, aten.fmod.Scalar, aten.fmod.Tensor)
def remainder(c: Context, node: Node, self: Any, other: Any) -> Any:
    """What a division leaves, with the sign of the divisor (`remainder`) or of the dividend (`fmod`)."""
    dtype = traced(node).dtype
    name = "floor_mod" if node.target in (aten.remainder.Scalar, aten.remainder.Tensor) else "mod"
    return c.op(name, c.tensor(self, dtype), c.tensor(other, dtype))


@translates(aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_min.Tensor, aten.clamp_max.default,
            aten.clamp_max.Tensor)  # fmt: skip
def clamp(c: Context, node: Node, self: Node, *bounds: Any, **named: Any) -> Any:
    """Bounded from below, from above, or both."""
    names = ("max",) if node.target in (aten.clamp_max.default, aten.clamp_max.Tensor) else ("min", "max")
    given = {**dict(zip(names, bounds, strict=False)), **named}
    dtype = traced(node).dtype
    value = c.tensor(self, dtype)
    if given.get("min") is not None:
        value = c.op("maximum", value, c.tensor(given["min"], dtype))
    return value if given.get("max") is None else c.op("minimum", value, c.tensor(given["max"], dtype))


@translates(aten.rand.default, aten.rand_like.default, aten.randn.default, aten.randn_like.default)
def random(c: Context, node: Node, *args: Any, **options: Any) -> Any:
    """Random numbers: other ones than torch draws, and others in each call."""
    del args, options
    fake = traced(node)
    shape = c.sizes(list(fake.shape))
    smallest, one = c.constant(torch.finfo(torch.float32).tiny, torch.float32), c.constant(1, torch.float32)
    if node.target in (aten.rand.default, aten.rand_like.default):
        return c.cast(c.op("random_uniform", shape, c.constant(0, torch.float32), one, "f32"), fake.dtype)
    # the transform of Box and Muller: a radius and an angle
    radius, angle = (c.op("random_uniform", shape, smallest, one, "f32", 0, seed) for seed in (1, 2))
    radius = c.op("sqrt", c.op("multiply", c.constant(-2, torch.float32), c.op("log", radius)))
    angle = c.op("cos", c.op("multiply", c.constant(2 * math.pi, torch.float32), angle))
    return c.cast(c.op("multiply", radius, angle), fake.dtype)
