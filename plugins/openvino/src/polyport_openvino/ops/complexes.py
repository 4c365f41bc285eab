"""Complex numbers, which OpenVINO has as pairs of real numbers along a last axis.

The frontend has a representation of its own that its other translations understand; none of ours meets it: complex values go
through these translations only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openvino as ov
import torch

from polyport_dynamo.lowering.facts import traced
from polyport_openvino.context import Context
from polyport_openvino.ops.table import translates_complex

aten = torch.ops.aten
Node = torch.fx.Node


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _paired(c: Context, real: ov.Output, imaginary: ov.Output) -> ov.Output:
    last = c.constant(-1, torch.int64)
    return c.op("concat", [c.op("unsqueeze", part, last) for part in (real, imaginary)], -1)


def _part(c: Context, value: ov.Output, index: int) -> ov.Output:
    return c.op("gather", value, c.constant(index, torch.int64), c.constant(-1, torch.int64))


def _pairs(c: Context, arg: Any, dtype: torch.dtype) -> ov.Output:
    """A complex or real operand as pairs; a real one has no imaginary part."""
    if isinstance(arg, Node) and traced(arg).dtype.is_complex:
        return c.cast(c.value(arg), dtype)
    if isinstance(arg, complex):
        return c.constant([arg.real, arg.imag], dtype)
    value = c.tensor(arg, dtype)
    return _paired(c, value, c.op("multiply", value, c.constant(0, dtype)))


@translates_complex(aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default, aten.clone.default,
                    aten.contiguous.default, aten.alias.default, aten.detach.default)  # fmt: skip
def convert(c: Context, node: Node, self: Node, *args: Any, **options: Any) -> Any:
    """Conversions and copies; a real type takes the real part."""
    del args, options
    dtype = traced(node).dtype
    if dtype.is_complex:
        return _pairs(c, self, _real(dtype))
    return c.cast(_part(c, c.value(self), 0), dtype)


@translates_complex(aten.view_as_real.default, aten.view_as_complex.default)
def reinterpret(c: Context, node: Node, self: Node) -> Any:
    """The same pairs."""
    del node
    return c.value(self)


@translates_complex(aten.real.default, aten.imag.default)
def part(c: Context, node: Node, self: Node) -> Any:
    """The real or the imaginary part."""
    if not traced(self).dtype.is_complex:
        return c.value(self)
    return _part(c, c.value(self), int(node.target is aten.imag.default))


@translates_complex(aten.complex.default)
def combine(c: Context, node: Node, real: Node, imag: Node) -> Any:
    """A number of its two parts."""
    dtype = _real(traced(node).dtype)
    shape = c.sizes(list(traced(node).shape))
    return _paired(
        c, *(c.op("broadcast", c.tensor(half, dtype), shape, broadcast_spec="NUMPY") for half in (real, imag))
    )


@translates_complex(aten.polar.default)
def polar(c: Context, node: Node, size: Node, angle: Node) -> Any:
    """A number of its length and angle."""
    dtype = _real(traced(node).dtype)
    length, turned = c.tensor(size, dtype), c.tensor(angle, dtype)
    return _paired(c, *(c.op("multiply", length, c.op(name, turned)) for name in ("cos", "sin")))


@translates_complex(aten.mul.Tensor)
def mul(c: Context, node: Node, self: Any, other: Any) -> Any:
    """Product."""
    dtype = _real(traced(node).dtype)
    left, right = _pairs(c, self, dtype), _pairs(c, other, dtype)
    a, b, x, y = _part(c, left, 0), _part(c, left, 1), _part(c, right, 0), _part(c, right, 1)
    real = c.op("subtract", c.op("multiply", a, x), c.op("multiply", b, y))
    return _paired(c, real, c.op("add", c.op("multiply", a, y), c.op("multiply", b, x)))


@translates_complex(aten.abs.default)
def absolute(c: Context, node: Node, self: Node) -> Any:
    """Length."""
    del node
    value = c.value(self)
    return c.op("sqrt", c.op("reduce_sum", c.op("multiply", value, value), c.ints(-1), False))


@translates_complex(
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default
)
def reshape(c: Context, node: Node, self: Node, *args: Any, **options: Any) -> Any:
    """The same numbers in another shape."""
    del args, options
    return c.op("reshape", c.value(self), c.sizes([*traced(node).shape, 2]), False)


def _scaled(
    c: Context, value: ov.Output, sizes: Sequence[Any], power: float, dtype: torch.dtype
) -> ov.Output:
    """A value times a power of the number of elements that are transformed."""
    if not power:
        return value
    scale = c.constant(1, dtype)
    for size in sizes:
        scale = c.op("multiply", scale, c.cast(c.scalar(size), dtype))
    return c.op("multiply", value, c.op("power", scale, c.constant(power, dtype)))


#: By the number that stands for it: the power of the number of elements by which torch scales.
_NORMS = {0: 0.0, 1: -0.5, 2: -1.0}


@translates_complex(aten._fft_c2c.default)
def fourier(c: Context, node: Node, self: Node, dim: Sequence[int], normalization: int, forward: bool) -> Any:
    """The Fourier transform and its inverse, which divides by the number of elements in OpenVINO."""
    fake = traced(self)
    dtype = _real(traced(node).dtype)
    axes = [axis % fake.dim() for axis in dim]
    made = c.op("dft" if forward else "idft", c.value(self), c.ints(*axes))
    power = _NORMS[normalization] + (0 if forward else 1)
    return _scaled(c, made, [fake.shape[axis] for axis in axes], power, dtype)


@translates_complex(aten._fft_r2c.default)
def fourier_of_real(
    c: Context, node: Node, self: Node, dim: Sequence[int], normalization: int, onesided: bool
) -> Any:
    """The Fourier transform of real numbers, whole or the half that is not redundant."""
    fake = traced(self)
    dtype = _real(traced(node).dtype)
    axes = [axis % fake.dim() for axis in dim]
    made = c.op("rdft", c.tensor(self, dtype), c.ints(*axes)) if onesided else \
        c.op("dft", _pairs(c, self, dtype), c.ints(*axes))  # fmt: skip
    return _scaled(c, made, [fake.shape[axis] for axis in axes], _NORMS[normalization], dtype)
