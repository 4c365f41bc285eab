"""Translations of ours give what torch gives: shapes, places, orders, and what is made from sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from lowered import check
from torch import Tensor


def table(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Different numbers in no order, of shape `[rows, 4, 6]`."""
    order = torch.randperm(rows * 24, generator=torch.Generator().manual_seed(rows)).reshape(rows, 4, 6)
    return (order % 2).bool() if dtype == torch.bool else order.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("function", [
    lambda x: x.reshape(-1, 6), lambda x: x.reshape(x.shape[0], 2, -1), lambda x: x.flatten(1), lambda x: x.view(x.shape[0] * 2, 12),
    lambda x: x.unflatten(-1, (2, 3)), lambda x: x.transpose(0, 2), lambda x: x.permute(1, 2, 0), lambda x: x.mT, lambda x: x[0].t(),
    lambda x: x.unsqueeze(-1), lambda x: x[:, :1].squeeze(1), lambda x: x[:, :1].expand(-1, 3, -1),
    lambda x: x[None].expand(2, -1, -1, -1), lambda x: x[:, 1:3], lambda x: x[:, -2:], lambda x: x[:, :, ::2], lambda x: x[-1],
    lambda x: x[1:], lambda x: x[:, 3], lambda x: x.split(4, -1), lambda x: x.split([1, 3], 1)[1], lambda x: x.chunk(2, -1)[1],
    lambda x: x.unbind(1)[2], lambda x: torch.cat([x, x[:1]]), lambda x: torch.stack([x, x], 1), lambda x: x.unfold(-1, 3, 2),
    lambda x: x.unfold(0, 2, 1), lambda x: x.reshape(0, 4, -1) if x.shape[0] == 0 else x.reshape(-1),
])  # fmt: skip
def test_moving(function: Callable[..., object], dtype: torch.dtype) -> None:
    check(function, [table(3, dtype)], [[table(5, dtype)]], atol=0, rtol=0)


@pytest.mark.parametrize("function", [
    lambda x, i: x[i], lambda x, i: x[:, i % 4], lambda x, i: x[i, i % 4], lambda x, i: x[:, i % 4, i], lambda x, i: x[i, :, i],
    lambda x, i: x[i[:, None], i[None] % 4], lambda x, i: x[-1 - i], lambda x, i: x[:, -1 - i % 4, -1 - i],
    lambda x, i: x.index_select(1, i % 4), lambda x, i: x.gather(1, (i % 4)[:, None, None].expand(-1, 2, 6)),
    lambda x, i: x[torch.arange(x.shape[0]), i % 4], lambda x, i: x[x > 7], lambda x, i: x[x[:, :, 0] > 7],
    lambda x, i: x[:, torch.tensor([True, False, True, True])], lambda x, i: torch.nn.functional.embedding(i, x[:, 0]),
    lambda x, i: torch.take_along_dim(x, (i % 4)[:, None, None], 1),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_picking(function: Callable[..., object], dtype: torch.dtype) -> None:
    """Indices count from the end too; masks pick as many as they have true elements."""
    pairs = [[table(3, dtype), torch.tensor([2, 0, 1])], [table(5, dtype), torch.tensor([1, 4, 0, 0, 2])]]
    check(function, pairs[0], pairs[1:], atol=0, rtol=0)


def written(x: Tensor, i: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, i % 4] = x[:, i % 4] + 1
    return out


def columns(x: Tensor, i: Tensor) -> Tensor:
    out = x.clone()
    out[:, :, i] = 5.0
    return out


@pytest.mark.parametrize("function", [
    lambda x, i: x.index_put((i,), x[i] * 2), lambda x, i: x.index_put((i, i % 4), torch.tensor(-1.0)),
    lambda x, i: x.index_put((i % 2,), x, accumulate=True), lambda x, i: x.index_put((-1 - i,), x[:, :1]), written,
    columns, lambda x, i: x.index_put((x > 7,), torch.tensor(0.5)),
    lambda x, i: x.index_put((x[:, :, 0] > 7,), x[0, 0]), lambda x, i: x.index_copy(0, i, x.flip(0)),
    lambda x, i: x.index_copy(2, i[:2], x[:, :, :2]), lambda x, i: x.scatter(1, (i % 4)[:, None, None].expand(-1, 1, 6), x[:, 1:]),
    lambda x, i: x.scatter(1, (i % 4)[:, None, None].expand(-1, 1, 6), 9.0),
    lambda x, i: x.scatter_add(1, torch.zeros_like(x, dtype=torch.int64), x),
])  # fmt: skip
def test_writing(function: Callable[..., object]) -> None:
    pairs = [[table(3), torch.tensor([2, 0, 1])], [table(5), torch.tensor([1, 4, 0, 3, 2])]]
    check(function, pairs[0], pairs[1:], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32])
@pytest.mark.parametrize("function", [
    lambda x: x.topk(2), lambda x: x.topk(3, dim=1, largest=False), lambda x: x.sort(), lambda x: x.sort(1, descending=True),
    lambda x: x.argsort(-1), lambda x: x.argmax(-1), lambda x: x.argmin(1, keepdim=True), lambda x: x.argmax(), lambda x: x.max(1),
    lambda x: x.min(-1, keepdim=True), lambda x: x.sort(0),
])  # fmt: skip
def test_order(function: Callable[..., object], dtype: torch.dtype) -> None:
    check(function, [table(3, dtype)], [[table(5, dtype)]], atol=0, rtol=0)


def test_equal_elements_keep_their_order() -> None:
    equal = torch.tensor([[1, 0, 1, 0, 1, 0]] * 2)
    check(
        lambda x: (x.sort(stable=True), x.argmax(-1), x.max(-1)),
        [equal],
        [[equal.repeat(2, 1)]],
        atol=0,
        rtol=0,
    )


@pytest.mark.parametrize("function", [
    lambda x: torch.arange(x.shape[0]), lambda x: torch.arange(1, x.shape[0] + 3, 2), lambda x: torch.arange(0, 1, 0.25),
    lambda x: torch.full((x.shape[0], 2), 3), lambda x: torch.zeros(x.shape[0], 0), lambda x: torch.ones_like(x, dtype=torch.int64),
    lambda x: x.new_full((2, x.shape[0]), 0.5), lambda x: torch.zeros_like(x), lambda x: torch.scalar_tensor(x.shape[0]) * 2,
    lambda x: torch.ones(x.shape[0] * 2, x.shape[0] // 2), lambda x: x.tril(), lambda x: x.triu(1), lambda x: x.triu(-1 - x.shape[0]),
    lambda x: torch.ones(x.shape[0] % 2 + 1, -(-x.shape[0] // 2)), lambda x: x.histc(4, 0, 8),
    lambda x: torch.full((int(x.shape[0] ** 0.5),), 1.0) if isinstance(x.shape[0], int) else torch.ones(2),
])  # fmt: skip
def test_sizes(function: Callable[..., object]) -> None:
    check(function, [table(5)], [[table(8)]], atol=0, rtol=0)


def test_sizes_are_computed_once() -> None:
    """A size that several operators need is read from the input once."""
    model = check(
        lambda x, y: (x.new_zeros(x.shape[0] + 1, 2), x.new_ones(x.shape[0] + 1, 3), y.expand(x.shape[0] + 1, 4)),
        [torch.ones(3, 2), torch.ones(1, 4)], [[torch.ones(6, 2), torch.ones(1, 4)]], atol=0, rtol=0)  # fmt: skip
    kinds = [node.get_type_name() for node in model.get_ops()]
    assert kinds.count("ShapeOf") == 1
    assert kinds.count("Add") == 1


def test_how_many_places_a_mask_has_is_a_size() -> None:
    """The size is known at run time only, and further shapes depend on it."""

    def function(x: Tensor) -> Tensor:
        picked = x[x > 7]
        torch._check(picked.shape[0] > 2)
        return picked[:, None] + picked.new_ones(picked.shape[0], 2)

    check(function, [table(3)], [[table(5)]], atol=0, rtol=0)
