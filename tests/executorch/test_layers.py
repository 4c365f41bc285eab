"""Layers with weights of all layouts that XNNPACK computes: the same numbers as eager at any size."""

from __future__ import annotations

import functools

import pytest
import torch
from several import ROWS, SHAPES, Several, check, images, kernels, noise
from several import tokens as tokens_of
from torch import Tensor, nn

tokens = functools.partial(tokens_of, width=32)
pytestmark = pytest.mark.usefixtures("seeded")


# ── convolutions along one axis ─────────────────────────────────────────────────────────────────────────────────────


class Along(nn.Module):
    """A convolution along the tokens."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x.transpose(1, 2)).transpose(1, 2)
        return made


WAVES = tokens((1, 5), (3, 9), (2, 2), (1, 1), (2, 64), width=6)


def test_convolutions() -> None:
    """Batch and length vary both."""
    layers = {
        "plain": nn.Conv1d(6, 4, 3, padding=1),
        "point": nn.Conv1d(6, 5, 1, bias=False),
        "depth": nn.Conv1d(6, 6, 4, groups=6, padding=3),
        "strided": nn.Conv1d(6, 4, 3, stride=2, padding=1),
        "dilated": nn.Conv1d(6, 4, 3, stride=2, dilation=2, groups=2, padding=4),
        "wide": nn.Conv1d(6, 12, 2, groups=3, padding=1),
    }
    parts = {name: Along(layer) for name, layer in layers.items()}
    taken, left = check(Several(**parts), *WAVES, atol=1e-5, rtol=1e-5)
    assert taken["aten::convolution"] == len(layers)
    assert not kernels(left, "convolution")


def test_transposed_convolutions() -> None:
    layers = {
        "plain": nn.ConvTranspose1d(6, 4, 3),
        "strided": nn.ConvTranspose1d(6, 4, 3, stride=2, padding=1, output_padding=1),
        "grouped": nn.ConvTranspose1d(6, 4, 4, stride=2, groups=2, bias=False),
        "dilated": nn.ConvTranspose1d(6, 4, 3, dilation=2),
    }
    check(Several(**{name: Along(layer) for name, layer in layers.items()}), *WAVES, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_convolutions_with_padding_by_name(padding: str) -> None:
    layer = nn.Conv1d(6, 4, 3, padding=padding, dilation=2)
    check(Several(layer=Along(layer)), *tokens((1, 5), (3, 9), (2, 6), width=6), atol=1e-5, rtol=1e-5)


def test_convolution_with_a_computed_kernel() -> None:
    model = Several(
        computed=lambda x: torch.conv1d(x.transpose(1, 2), x[:1, :1].mT.expand(6, 6, 1).sigmoid())
    )
    check(model, *tokens((1, 5), (3, 9), width=6), atol=1e-5, rtol=1e-5)


# ── weights ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def with_weight(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight = nn.Parameter(weight)
    return layer


def test_weights_that_are_parts_of_one_tensor() -> None:
    """Each delegate gets its own bytes, not those at the start of what they are parts of."""
    rows, columns = noise(2, 32, 32), noise(32, 64)
    model = Several(
        first=with_weight(rows[0]),
        second=with_weight(rows[1]),
        left=with_weight(columns[:, :32]),
        right=with_weight(columns[:, 32:]),
    )
    assert model.layers["first"].weight.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
    assert model.layers["second"].weight.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
    check(model, *tokens((1, 5), (3, 9)), atol=1e-5, rtol=1e-5)
    assert model.layers["second"].weight.data_ptr() == rows[1].data_ptr()  # the model keeps its own


class Shifted(nn.Module):
    """Adds a tensor that is no parameter."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.register_buffer("tensor", tensor)

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + self.tensor


class Fixed(Shifted):
    """Multiplies by a tensor that is no parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.tensor)


def test_buffers_that_are_parts_of_one_tensor() -> None:
    rows, matrices = noise(3, 32), noise(2, 32, 32)
    model = Several(
        first=Shifted(rows[0]),
        second=Shifted(rows[1]),
        spread=Shifted(noise(64)[::2]),
        one=Shifted(rows[2, 5:6]),
        matrix=Fixed(matrices[0]),
        other=Fixed(matrices[1]),
    )
    check(model, *tokens((1, 5), (3, 9)), atol=1e-5, rtol=1e-5)


def test_weights_in_another_order() -> None:
    """One that is another transposed, in the same memory."""
    weight = noise(32, 32)
    model = Several(one=with_weight(weight), other=with_weight(weight.t()))
    check(model, *tokens((1, 5), (3, 9)), atol=1e-5, rtol=1e-5)


def test_weights_with_their_channels_last() -> None:
    """As `model.to(memory_format=torch.channels_last)` leaves them."""
    model = Several(layer=nn.Conv2d(3, 4, 3), point=nn.Conv2d(3, 4, 1), depth=nn.Conv2d(3, 3, 3, groups=3))
    model.to(memory_format=torch.channels_last)
    check(model, *images((1, 3, 8, 8), (3, 3, 8, 8)), config=ROWS, atol=1e-5, rtol=1e-5)


def test_weight_of_two_delegates() -> None:
    """The same layer before and after something that only a kernel computes."""
    layer = nn.Linear(32, 32)
    taken, left = check(
        Several(layer=layer, twice=lambda x: layer(layer(x).sort(1).values)),
        *tokens(*SHAPES),
        atol=1e-5,
        rtol=1e-5,
    )
    assert taken["delegates"] >= 2
    assert not kernels(left, "mm", "linear")
