"""What is added around a tensor is what torch adds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from lowered import check
from torch import Tensor
from torch.nn.functional import pad


def rows(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(count * 24).reshape(count, 4, 6) % 7).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("function", [
    lambda x: pad(x, (1, 2)), lambda x: pad(x, (0, 0, 2, 1), value=1), lambda x: pad(x, (1, 0, 0, 1, 2, 0)),
    lambda x: pad(x, (-1, 2)), lambda x: pad(x, (0, 0, -1, -1)), lambda x: pad(x, (0, x.shape[0])),
    lambda x: pad(x, (0, 0, 0, 0, x.shape[0] % 4, 0)), lambda x: torch.constant_pad_nd(x, (1, 1), 2),
])  # fmt: skip
def test_numbers(function: Callable[..., object], dtype: torch.dtype) -> None:
    """Also of sizes that follow from the tensor's; negative ones crop."""
    check(function, [rows(3, dtype)], [[rows(5, dtype)], [rows(2, dtype)]], atol=0, rtol=0)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_its_own_elements(mode: str) -> None:
    check(lambda x: pad(x, (2, 1), mode=mode), [rows(3)], [[rows(5)]], atol=0, rtol=0)


def test_infinity() -> None:
    check(lambda x: pad(x, (1, 1), value=float("-inf")).amax(-1), [rows(3)], [[rows(5)]], atol=0, rtol=0)
