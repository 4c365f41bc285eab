"""Attention that XNNPACK computes: the same numbers as eager with any mask, at any size."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from several import check, check_logits, kernels, noise
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attention
from transformers import PreTrainedConfig, PreTrainedModel

sys.path[:0] = [str(Path(__file__).parents[1])]

import zoo  # noqa: E402

pytestmark = pytest.mark.usefixtures("seeded")

Attends = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Attention(PreTrainedModel):
    """Queries, keys and values of one tensor, and what functions make of them and of a mask."""

    config_class = PreTrainedConfig

    def __init__(self, shared: int, **functions: Attends) -> None:
        super().__init__(PreTrainedConfig())
        self.q, self.k, self.v = (nn.Linear(32, 8 * heads) for heads in (4, 4 // shared, 4 // shared))
        self.functions = functions
        self.post_init()
        self.eval()

    def _init_weights(self, module: nn.Module) -> None:
        """As torch makes them: the scores of others are all but 0."""

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        q, k, v = (
            layer(inputs_embeds).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return {name: function(q, k, v, attention_mask) for name, function in self.functions.items()}


def padded(batch: int, length: int) -> dict[str, Any]:
    """Each row lacks one more token on the left than the row before it: its first queries attend to nothing."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    for row in range(batch):
        mask[row, : min(row, length)] = 0
    return {"inputs_embeds": noise(batch, length, 32, seed=batch * 100 + length) * 2, "attention_mask": mask}


MASKED = [padded(*shape) for shape in ((2, 5), (1, 5), (3, 9), (3, 2), (2, 1))]


def allowed(mask: Tensor) -> Tensor:
    places = torch.arange(mask.shape[1])
    return (places <= places[:, None])[None, None] & mask[:, None, None].bool()


def row(mask: Tensor) -> Tensor:
    return mask[:, None, None].bool()


def added(kept: Tensor, lowest: float) -> Tensor:
    return torch.zeros(kept.shape).masked_fill(~kept, lowest)


def of_heads(mask: Tensor) -> Tensor:
    """A mask for each head."""
    all_, causal = row(mask).expand(-1, 1, mask.shape[1], -1), allowed(mask)
    return torch.cat((causal, all_, causal, all_), 1)


def repeated(x: Tensor) -> Tensor:
    """Heads side by side, as models write it."""
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, 2, length, width).reshape(batch, heads * 2, length, width)


INFINITE, LOWEST = float("-inf"), torch.finfo(torch.float32).min


@pytest.mark.slow
def test_attention() -> None:
    """With any mask or none: queries that may attend to nothing are zeros, or uniform where the mask is finite."""
    functions: dict[str, Attends] = {
        "none": lambda q, k, v, _: attention(q, k, v),
        "causal": lambda q, k, v, _: attention(q, k, v, is_causal=True),
        "bool": lambda q, k, v, m: attention(q, k, v, allowed(m)),
        "row": lambda q, k, v, m: attention(q, k, v, row(m)),
        "infinite": lambda q, k, v, m: attention(q, k, v, added(allowed(m), INFINITE)),
        "finite": lambda q, k, v, m: attention(q, k, v, added(allowed(m), LOWEST), scale=0.5),
        "heads": lambda q, k, v, m: attention(q, k, v, of_heads(m)),
        "wide": lambda q, k, v, m: attention(q, k, torch.cat((v, v * 2), -1), allowed(m)),
    }
    taken, left = check(Attention(1, **functions), *MASKED, atol=1e-5, rtol=1e-5)
    assert taken["aten::_softmax"] == len(functions)
    assert taken["aten::matmul"] == 2 * len(functions)
    assert not kernels(left, "softmax", "mm", "mul", "linear", "div")


def test_attention_of_one_layer_is_in_two_delegates() -> None:
    """Before its mask is there, and after."""
    model = Attention(1, layer=lambda q, k, v, m: attention(q, k, v, allowed(m)))
    taken, left = check(model, *MASKED, atol=1e-5, rtol=1e-5)
    assert taken["delegates"] <= 2
    assert (taken["aten::_softmax"], taken["aten::matmul"], taken["aten::linear"]) == (1, 2, 3)
    assert not kernels(left, "softmax", "mm", "mul")


@pytest.mark.slow
def test_attention_with_shared_keys() -> None:
    """Heads that share keys are rows of one product: none of the keys is repeated."""
    functions: dict[str, Attends] = {
        "none": lambda q, k, v, _: attention(q, k, v, enable_gqa=True),
        "causal": lambda q, k, v, _: attention(q, repeated(k), repeated(v), is_causal=True),
        "bool": lambda q, k, v, m: attention(q, repeated(k), repeated(v), allowed(m)),
        "row": lambda q, k, v, m: attention(q, repeated(k), repeated(v), row(m)),
        "infinite": lambda q, k, v, m: attention(q, repeated(k), repeated(v), added(allowed(m), INFINITE)),
        "finite": lambda q, k, v, m: attention(q, k, v, added(allowed(m), LOWEST), enable_gqa=True),
        "last": lambda q, k, v, m: attention(q[:, :, -1:], k, v, row(m), enable_gqa=True),
    }
    taken, left = check(Attention(2, **functions), *MASKED, atol=1e-5, rtol=1e-5)
    assert taken["aten::_softmax"] == len(functions)
    assert not kernels(left, "softmax", "mm", "expand", "repeat")


def test_attention_of_some_queries_with_shared_keys() -> None:
    """As many queries as no input has tokens."""
    model = Attention(2, some=lambda q, k, v, _: attention(q[:, :, ::2], k, v, enable_gqa=True))
    check(model, *MASKED, atol=1e-5, rtol=1e-5)


def test_attention_that_stays_as_it_is() -> None:
    """Without an axis for heads, and with a mask of its own for each head of those that share keys."""
    model = Attention(
        2,
        three=lambda q, k, v, _: attention(q[:, 0], k[:, 0], v[:, 1]),
        heads=lambda q, k, v, m: attention(q, repeated(k), repeated(v), of_heads(m)),
    )
    check(model, *MASKED, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_soft_capping() -> None:
    """Scores that are bounded by a hyperbolic tangent, and a mask that needs kernels beside it: no delegates in a circle."""
    model, _, _ = zoo.build("gemma2")
    model.config.attn_logit_softcapping = model.config.final_logit_softcapping = 2.0
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 2.0

    taken, left = check_logits(model)
    assert taken["aten::tanh"] >= 3  # two layers, and the logits
    assert not kernels(left, "softmax", "mm", "tanh", "rsqrt")
