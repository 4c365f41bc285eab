"""Translations of ours give what torch gives: layers, attention, mixtures of experts, loops and Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from lowered import check, model_of, run, trace
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attention

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("function", [
    lambda x: nn.functional.linear(x, x[0, :4]), lambda x: nn.functional.linear(x, x[0, :4], x[0, 0, :4]), lambda x: x @ x.mT,
    lambda x: torch.bmm(x, x.mT), lambda x: torch.addmm(x[0, :, :1], x[0], x[0].t(), beta=2, alpha=0.5),
    lambda x: torch.baddbmm(x[:, :, :1], x, x.mT), lambda x: nn.functional.layer_norm(x, (8,), x[0, 0], x[0, 1]),
    lambda x: nn.functional.layer_norm(x, (6, 8)), lambda x: nn.functional.rms_norm(x, (8,), x[0, 0], 1e-6),
    lambda x: nn.functional.group_norm(x, 2, x[0, :, 0], x[0, :, 1]), lambda x: nn.functional.group_norm(x, 3),
    lambda x: nn.functional.batch_norm(x, x[0, :, 0], x[0, :, 1].abs() + 1, x[0, :, 2], x[0, :, 3]),
])  # fmt: skip
def test_layers(function: Callable[..., object], dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype] * 4
    check(
        function,
        [noise(2, 6, 8, dtype=dtype)],
        [[noise(3, 6, 8, dtype=dtype)]],
        atol=tolerance,
        rtol=tolerance,
    )


def _allowed(rows: int, length: int) -> Tensor:
    """May each query attend to each key: the first of row 1 to none, as left padding makes."""
    made = torch.ones(length, length).tril().bool().expand(rows, 1, length, length).clone()
    made[1, :, :2, :2] = False
    return made


def _added(rows: int, length: int, lowest: float) -> Tensor:
    return torch.zeros(rows, 1, length, length).masked_fill(~_allowed(rows, length), lowest)


@pytest.mark.parametrize("mask", [
    lambda rows, length: _allowed(rows, length), lambda rows, length: _allowed(rows, length)[:, :, -1:],
    lambda rows, length: _added(rows, length, float("-inf")),
    lambda rows, length: _added(rows, length, torch.finfo(torch.float32).min),
    lambda rows, length: _added(rows, length, -1.5)[:, :, -1:],
])  # fmt: skip
@pytest.mark.parametrize("scale", [None, 0.25])
def test_attention_with_a_mask(mask: Callable[[int, int], Tensor], scale: float | None) -> None:
    """Rows that may attend to nothing are zeros, or uniform where the mask is finite."""
    given, other = ([noise(rows, 2, 5, 8), mask(rows, 5)] for rows in (2, 4))
    check(lambda x, m: attention(x, x * 2, x + 1, m, scale=scale), given, [other], atol=1e-5, rtol=1e-5)


def test_attention_with_a_mask_of_the_program() -> None:
    """A program that writes infinities into its mask."""

    def function(x: Tensor, keep: Tensor) -> Tensor:
        mask = torch.zeros_like(x[:, :1, :, :1]).mT.masked_fill(~keep[:, None, None], float("-inf"))
        return attention(x, x, x, mask.expand(-1, 1, x.shape[2], -1))

    keep = torch.tensor([[True, False, True], [False, False, False]])
    check(function, [noise(2, 2, 3, 8), keep], [[noise(4, 2, 3, 8), keep.repeat(2, 1)]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (3, 5), (5, 3)])
def test_causal_attention(queries: int, keys: int) -> None:
    """The triangle starts in the upper left corner, however many keys there are."""
    pairs = [[noise(rows, 2, queries, 8), noise(rows, 2, keys, 8, seed=1)] for rows in (2, 3)]
    check(lambda q, k: attention(q, k, k * 2, is_causal=True), pairs[0], pairs[1:], atol=1e-5, rtol=1e-5)


def repeated(x: Tensor, times: int) -> Tensor:
    """Heads side by side, as models write it."""
    batch, heads, length, width = x.shape
    return (
        x[:, :, None, :, :]
        .expand(batch, heads, times, length, width)
        .reshape(batch, heads * times, length, width)
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("mask", ["none", "a row per query", "one row", "causal"])
@pytest.mark.parametrize("as_they_are", [True, False])
def test_heads_that_share_keys(dtype: torch.dtype, mask: str, as_they_are: bool) -> None:
    """Keys and values are not repeated, but where a triangle needs its rows."""

    def function(q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
        options = {"is_causal": True} if mask == "causal" else {} if mask == "none" else {"attn_mask": keep}
        if as_they_are:
            return attention(q, k, k * 2, enable_gqa=True, **options)
        return attention(q, repeated(k, 2), repeated(k * 2, 2), **options)

    samples = []
    for rows in (2, 3):
        keep = torch.rand(rows, 1, 1 if mask == "one row" else 5, 6) > 0.4
        keep[0, :, -1] = False  # a query that may attend to nothing
        samples.append([noise(rows, 4, 5, 8, dtype=dtype), noise(rows, 2, 6, 8, dtype=dtype, seed=1), keep])
    model = check(function, samples[0], samples[1:], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    kinds = [node.get_type_name() for node in model.get_ops()]
    assert kinds.count("ScaledDotProductAttention") == 1
    assert kinds.count("Broadcast") == (2 if mask == "causal" else 0)


@pytest.mark.parametrize("size", [(2, 2, 0, 8), (2, 2, 3, 8)])
def test_attention_over_a_cache(size: tuple[int, ...]) -> None:
    """The cache may be empty."""

    def function(past: Tensor, new: Tensor) -> object:
        keys = torch.cat([past, new], 2)
        return attention(new, keys, keys * 2), keys

    check(
        function,
        [noise(2, 2, 4, 8), noise(2, 2, 2, 8)],
        [[noise(*size), noise(2, 2, 2, 8)]],
        dynamic=(2,),
        atol=1e-5,
        rtol=1e-5,
    )


def test_products_of_groups() -> None:
    """Groups may be empty, and rows behind the last are zeros."""
    import transformers.integrations.moe  # noqa: F401  # registers the operator

    weight = noise(3, 8, 4)

    def function(x: Tensor, ends: Tensor) -> Tensor:
        return torch.ops.transformers.grouped_mm_fallback(x, weight.to(x.device), ends)

    pairs = [[noise(6, 8), torch.tensor([2, 2, 6])], [noise(9, 8), torch.tensor([0, 5, 9])]]
    program = trace(function, *pairs[0])
    model = model_of(program, 2, 1)
    for x, ends in pairs:
        torch.testing.assert_close(
            run(model, [x, ends.to(torch.int64)])[0], function(x, ends), atol=1e-5, rtol=1e-5
        )


def test_a_loop() -> None:
    """What a step carries on, what it returns, and a tensor that all steps read."""
    from torch._higher_order_ops.scan import scan

    def function(x: Tensor, y: Tensor) -> object:
        y = y[:4]

        def step(carried: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
            return carried * 0.5 + part @ y, (carried.sum(-1) + part[:, 0]).clamp(min=0)

        return scan(step, torch.zeros_like(x[0]), x)

    matrix = noise(4, 4, seed=1)
    check(function, [noise(3, 2, 4), matrix], [[noise(6, 2, 4), matrix]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("function", [
    lambda x: torch.fft.fftn(x, dim=(1, 2)).real, lambda x: torch.view_as_real(torch.fft.ifft(x.to(torch.complex64))),
    lambda x: torch.fft.rfft(x, norm="ortho").abs(), lambda x: torch.view_as_real(torch.fft.fft(x, norm="forward")),
    lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(x.shape[0], 6, 4, 2)) * torch.polar(x[:, :, :4].abs(), x[:, :, 4:])),
    lambda x: torch.complex(x, x * 2).imag + torch.fft.ifft2(torch.complex(x, x)).real,
])  # fmt: skip
def test_complex_numbers(function: Callable[..., object]) -> None:
    check(function, [noise(2, 6, 8)], [[noise(3, 6, 8)]], atol=1e-4, rtol=1e-4)


def test_random_numbers() -> None:
    """Others than torch draws, of the same distribution."""
    model = model_of(trace(lambda x: (torch.randn_like(x), torch.rand_like(x)), noise(2, 8)), 1, 2)
    normal, uniform = run(model, [noise(20000, 8)])
    assert abs(float(normal.mean())) < 0.02
    assert abs(float(normal.std()) - 1) < 0.02
    assert 0 <= float(uniform.min()) < 0.01
    assert 0.99 < float(uniform.max()) <= 1
    assert abs(float(uniform.mean()) - 0.5) < 0.01
