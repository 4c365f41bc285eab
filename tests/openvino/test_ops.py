"""Translations of ours give what torch gives: arithmetic, comparisons, reductions and conversions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from lowered import check
from torch import Tensor

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
NUMBERS = [*FLOATS, torch.int64, torch.int32]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def values(rows: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Numbers from -3 to 3, none of them 0."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(rows, 5, generator=generator) > 0.5
    if dtype.is_floating_point:
        made = torch.rand(rows, 5, generator=generator) * 6 - 3
        return (made + made.sign() * 0.1).to(dtype)
    return torch.tensor([-3, -2, -1, 1, 2, 3], dtype=dtype)[
        torch.randint(0, 6, (rows, 5), generator=generator)
    ]


def compare(function: Callable[..., object], dtype: torch.dtype, count: int = 2) -> None:
    tolerance = TOLERANCE.get(dtype, 0)
    args, other = ([values(rows, dtype, seed) for seed in range(count)] for rows in (3, 4))
    check(function, args, [other], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("function", [
    lambda x, y: x + y, lambda x, y: torch.add(x, y, alpha=2), lambda x, y: x - y, lambda x, y: torch.sub(x, y, alpha=3),
    lambda x, y: 2 - x * y, lambda x, y: torch.rsub(x, y, alpha=2), lambda x, y: x * 3 + y, torch.maximum, torch.minimum,
    lambda x, y: x**2 + y, lambda x, y: -x + y.abs(), lambda x, y: x.sign() + y,
])  # fmt: skip
def test_arithmetic(function: Callable[..., object], dtype: torch.dtype) -> None:
    compare(function, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int32])
@pytest.mark.parametrize("function", [
    lambda x, y: x // y, lambda x, y: x % y, lambda x, y: x // 2, lambda x, y: x % -2, torch.fmod,
    lambda x, y: torch.div(x, y, rounding_mode="trunc"), lambda x, y: torch.div(x, y, rounding_mode="floor"),
    lambda x, y: torch.div(x, 2, rounding_mode="trunc"), lambda x, y: x / y, lambda x, y: torch.div(x, y),
])  # fmt: skip
def test_division(function: Callable[..., object], dtype: torch.dtype) -> None:
    """Quotients that are not near a whole number, where rounding would be a matter of the last bit."""
    args, other = ([values(rows, dtype, 0), values(rows, dtype, 1)] for rows in (3, 4))
    check(function, args, [other], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("function", [
    lambda x, y: x + y, lambda x, y: x * y, torch.maximum, torch.minimum, lambda x, y: x & y, lambda x, y: x | y,
    lambda x, y: x ^ y, lambda x, y: ~x | y, lambda x, y: x == y, lambda x, y: x < y, lambda x, y: x.any() | y.all(),
    lambda x, y: x.any(-1), lambda x, y: y.all(0, keepdim=True), lambda x, y: torch.logical_not(x), lambda x, y: x.sum(-1),
    lambda x, y: x.float() - y.long(), lambda x, y: x.cumsum(-1), lambda x, y: x.long().argmax(-1),
])  # fmt: skip
def test_truth_values(function: Callable[..., object]) -> None:
    compare(function, torch.bool)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("function", [
    lambda x, y: x & y, lambda x, y: x | y, lambda x, y: x ^ y, lambda x, y: ~x, torch.logical_and, torch.logical_or,
    torch.logical_xor, lambda x, y: torch.logical_not(x - y), lambda x, y: x.bool(), lambda x, y: x.sum(), lambda x, y: x.amax(-1),
    lambda x, y: x > 0.5, lambda x, y: x.float().mean(), lambda x, y: x.cumsum(0), lambda x, y: x.clamp(min=0.5),
    lambda x, y: torch.where(x > y, x, 0.5), lambda x, y: (x + 2**31 - 10).clamp(max=2**31 - 12) - 2**31,
])  # fmt: skip
def test_integers(function: Callable[..., object], dtype: torch.dtype) -> None:
    args, other = ([values(rows, dtype, 0), values(rows, dtype, 1)] for rows in (3, 4))
    check(function, args, [other], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("function", [
    torch.exp, torch.sin, torch.cos, torch.tanh, torch.sigmoid, torch.relu, torch.floor, torch.ceil, torch.erf,
    torch.nn.functional.silu, torch.nn.functional.gelu, lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    lambda x: x.abs().log(), lambda x: x.abs().sqrt(), lambda x: x.abs().rsqrt(), lambda x: 1 / x, lambda x: x.softmax(-1),
    lambda x: x.log_softmax(0), lambda x: x.mean(-1), lambda x: x.sum((0, 1)), lambda x: x.amin(0), lambda x: x.max(),
    lambda x: x.min(), lambda x: x.mean(), lambda x: x.clamp(-1, 1), lambda x: x.clamp_min(0), lambda x: x.clamp_max(0.25),
    lambda x: x.float() + 1, lambda x: x.bool(), lambda x: x.int(), lambda x: x.masked_fill(x > 0, -1.0),
    lambda x: torch.where(x > 0, x, 0.0), lambda x: x.cumsum(-1), lambda x: torch.zeros_like(x).copy_(x[:1]),
    lambda x: x.clone().fill_(2), lambda x: torch.nn.functional.dropout(x, 0.5, training=False),
])  # fmt: skip
def test_functions_of_floats(function: Callable[..., object], dtype: torch.dtype) -> None:
    compare(function, dtype, 1)


def test_a_fraction_is_true() -> None:
    """As a number it would be cut to 0."""
    check(lambda x: x.bool(), [torch.tensor([0.5, 0.0, -0.1])], atol=0, rtol=0)


def test_scalars_have_no_axes() -> None:
    """Reductions and products of tensors without axes."""
    check(
        lambda x: (x.sum() * x.mean(), x.softmax(0) + x.amax(), x.t()),
        [torch.tensor(2.5)],
        atol=1e-6,
        rtol=1e-6,
    )


def test_infinities_and_nan_pass_through() -> None:
    odd = torch.tensor([[float("inf"), -float("inf"), float("nan"), 1.0]] * 2)
    check(lambda x: (x + 1, x.abs(), torch.where(x == x, x, 0.0), x == x, x.isnan()), [odd],
          [[odd.repeat(2, 1)]], atol=0, rtol=0)  # fmt: skip


def test_empty_axes() -> None:
    """A cache is empty before the first token."""
    check(lambda x, y: (torch.cat([x, y], 1), x.sum(1), x + 1), [torch.ones(2, 3), torch.ones(2, 2)],
          [[torch.ones(2, 0), torch.ones(2, 2)]], dynamic=(1,), atol=0, rtol=0)  # fmt: skip
