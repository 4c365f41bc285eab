"""What XNNPACK computes: layers and attention stay inside of delegates, with the same numbers as eager at any size."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from several import DYNAMIC, ROWS, SHAPES, Several, assert_same, check, images, kernels, noise
from several import tokens as tokens_of
from torch import Tensor, nn

from polyport_executorch import ExecutorchExporter

tokens = functools.partial(tokens_of, width=32)
pytestmark = pytest.mark.usefixtures("seeded")


# ── norms ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Norm(nn.Module):
    """As models write it out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def randomized(module: nn.Module) -> nn.Module:
    """Fresh norms multiply by 1 and add 0, which proves nothing."""
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def test_norms() -> None:
    """One delegate, nothing beside it, and in it no operator of theirs."""
    model = Several(
        layer=randomized(nn.LayerNorm(32)),
        bare=nn.LayerNorm(32, elementwise_affine=False),
        unbiased=randomized(nn.LayerNorm(32, bias=False)),
        near=randomized(nn.LayerNorm(32, eps=0.1)),
        rms=randomized(nn.RMSNorm(32)),
        rms_near=nn.RMSNorm(32, eps=0.1, elementwise_affine=False),
        written=Norm(32),
        mean=lambda x: x.mean(-1, keepdim=True),
    )
    given = tokens(*SHAPES)
    given.append({"inputs_embeds": noise(2, 3, 32) * 5 + 3})
    given.append({"inputs_embeds": torch.zeros(1, 2, 32)})
    taken, left = check(model, *given, atol=1e-5, rtol=1e-5)
    assert taken["delegates"] == 1
    assert not kernels(left, "norm", "mean", "rsqrt", "mul", "add.out", "sub")


def test_norms_and_means_of_other_axes() -> None:
    """What isn't written so stays right: several axes, one that varies, and whole numbers."""
    model = Several(
        several=nn.Sequential(nn.Unflatten(-1, (4, 8)), randomized(nn.LayerNorm((4, 8)))),
        dropped=lambda x: x.mean(-1),
        both=lambda x: x.mean((-1, 1)),
        length=lambda x: x.mean(1, keepdim=True),
        double=lambda x: x.mean(-1, keepdim=True, dtype=torch.float64),
        squares=lambda x: x.var(-1, keepdim=True),
    )
    check(model, *tokens(*SHAPES), atol=1e-5, rtol=1e-5)


# ── rotary embeddings ───────────────────────────────────────────────────────────────────────────────────────────────


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def test_turned_halves() -> None:
    """Columns that change places are a product with a constant, which needs no kernel between delegates."""
    model = Several(
        halves=rotated,
        heads=lambda x: rotated(x.unflatten(-1, (4, 8)).transpose(1, 2)),
        between=lambda x: torch.cat((x[..., 1::2], -x[..., ::2]), -1),
        parts=lambda x: torch.cat((-x[..., :3], x[..., 3:8], x[..., -4:], x[..., :-30]), -1),
    )
    taken, left = check(model, *tokens(*SHAPES), atol=1e-6, rtol=1e-6)
    assert taken["aten::linear"] == 4
    assert "aten::cat" not in taken
    assert not kernels(left, "cat", "neg", "slice")


def test_what_is_put_together_otherwise() -> None:
    """Of two tensors, along another axis, of whole numbers, or computed before: no product."""
    model = Several(
        two=lambda x: torch.cat((x[..., :4], -(x * 2)[..., 4:8]), -1),
        rows=lambda x: torch.cat((x[:, :1], -x), 1),
        whole=lambda x: rotated((x * 10).long()),
        flat=lambda x: rotated(x[:, 0]),
        uncut=lambda x: torch.cat((x, x[..., :3]), -1),
    )
    taken, _ = check(model, *tokens(*SHAPES), atol=1e-6, rtol=1e-6)
    assert "aten::linear" not in taken


def test_halves_of_something_wide() -> None:
    """The constant grows with the square of the width, and is worth it for heads only."""
    taken, left = check(Several(halves=rotated), *tokens((1, 5), (3, 2), width=1024), atol=0, rtol=0)
    assert "aten::linear" not in taken
    assert "aten::cat" in taken or kernels(left, "cat")


# ── activations ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_activations() -> None:
    """XNNPACK has one kind of GELU, which differs by up to 0.002 from the other."""
    model = Several(
        exact=nn.GELU(),
        tanh=nn.GELU("tanh"),
        written=lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
        silu=nn.SiLU(),
        capped=lambda x: 3 * torch.tanh(x / 3),
        relu=nn.ReLU(),
    )
    given = tokens(*SHAPES)
    given.append({"inputs_embeds": torch.linspace(-8, 8, 8 * 32).view(2, 4, 32)})
    taken, left = check(model, *given, atol=1e-5, rtol=1e-5)
    assert (taken["aten::gelu"], left["aten::gelu.out"]) == (1, 1)


# ── what ExecuTorch's own partitioner takes and then fails at ───────────────────────────────────────────────────────


def test_largest_along_an_axis() -> None:
    model = Several(
        values=lambda x: (x * 2).max(-1).values,
        places=lambda x: x.max(-1).indices,
        kept=lambda x: x.max(1, keepdim=True).values * 2,
        both=lambda x: x.max(1)[0] + x.max(1)[1],
        amax=lambda x: x.amax(-1) * 2,
        amax_kept=lambda x: x.amax(1, keepdim=True),
        least=lambda x: x.min(-1).values + 1,
        four=lambda x: x.unflatten(-1, (4, 8)).max(-1).values + 1,
        four_kept=lambda x: x.unflatten(-1, (4, 8)).max(2, keepdim=True).values + 1,
        four_rows=lambda x: x.unflatten(-1, (4, 8)).max(1).values + 1,
    )
    check(model, *tokens(*SHAPES), atol=1e-6, rtol=1e-6)


def test_new_axes() -> None:
    """At any place of a tensor that varies in two sizes."""
    model = Several(
        last=lambda x: (x * 2).unsqueeze(-1) + 1,
        first=lambda x: (x * 2).unsqueeze(0) + 1,
        middle=lambda x: (x * 2).unsqueeze(1) + 1,
        flat=lambda x: (x[..., 0] * 2).unsqueeze(-1) * x,
        between=lambda x: (x[..., 0] * 2).unsqueeze(1) + 1,
    )
    check(model, *tokens(*SHAPES), atol=1e-6, rtol=1e-6)


class Squeezed(nn.Module):
    def __init__(self, layer: nn.Module, *axes: int) -> None:
        super().__init__()
        self.layer, self.axes = layer, axes

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        return made.squeeze(self.axes) * 2


def test_axes_of_one_after_a_convolution() -> None:
    model = Several(
        channel=Squeezed(nn.Conv2d(3, 1, 3, padding=1), 1),
        area=Squeezed(nn.Conv2d(3, 4, 8), -1, -2),
        line=Squeezed(nn.Conv2d(3, 4, (8, 1)), 2),
    )
    check(model, *images((1, 3, 8, 8), (3, 3, 8, 8)), config=ROWS, atol=1e-5, rtol=1e-5)


def test_axis_of_one_of_images_of_any_size() -> None:
    model = Several(channel=Squeezed(nn.Conv2d(3, 1, 3, padding=1), 1))
    check(model, *images((1, 3, 16, 16), (3, 3, 12, 20), (2, 3, 16, 5)), atol=1e-5, rtol=1e-5)


def test_largest_of_neighbours() -> None:
    model = Several(
        layer=nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        plain=nn.MaxPool2d(2),
        turned=lambda x: nn.MaxPool2d(2)(x.permute(0, 2, 3, 1)),
    )
    taken, _ = check(model, *images((1, 3, 8, 8), (3, 3, 8, 8)), config=ROWS, atol=1e-5, rtol=1e-5)
    assert taken["aten::max_pool2d"] == 3


def test_largest_of_neighbours_without_a_stride() -> None:
    """It is the size of the pool then."""
    model = Several(
        plain=lambda x: nn.functional.max_pool2d(x, 2),
        turned=lambda x: nn.functional.max_pool2d(x.permute(0, 2, 3, 1), 2),
    )
    check(model, *images((1, 3, 8, 8), (3, 3, 8, 8)), config=ROWS, atol=1e-5, rtol=1e-5)


def test_more_axes_than_it_has() -> None:
    """XNNPACK has six; a delegate with more can't be loaded."""
    model = Several(
        six=lambda x: x.unflatten(-1, (2, 2, 2, 4)) * 2 + 1,
        seven=lambda x: x.unflatten(-1, (2, 2, 2, 2, 2)) * 2 + 1,
        summed=lambda x: (x.unflatten(-1, (2, 2, 2, 2, 2)) * x[:, :, :1, None, None, None, None]).sum(-1),
    )
    taken, left = check(model, *tokens(*SHAPES), atol=1e-5, rtol=1e-5)
    assert (taken["aten::mul.Tensor"], left["aten::mul.out"]) == (1, 2)


class Weighted(nn.Module):
    """A function of a tensor and of a weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.rand(32)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.sigmoid(x * (1 - w)),
        lambda x, w: torch.sigmoid((1 + w) * (x * 2)),
        lambda x, w: x[:, 0] * (1 - w) + x[:, 0] * 3,
        lambda x, w: torch.sigmoid(x[:, :1] * 2 + x[:1] * 3),
        lambda x, w: torch.sigmoid(x[:1] * 3 + x * w) + x,
        lambda x, w: torch.sigmoid(x[:, :1] * 2 * w + x[:, 0] * (1 - w)),
        lambda x, w: torch.sigmoid((x.mean(0) * 2) * x),
    ],
    ids=["weight", "before", "internal", "rows and tokens", "rows", "rows and rows", "mean"],
)
def test_sizes_that_are_equal_at_the_first_call(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """XNNPACK gives a result the memory of an operand of that size, and keeps to it when the result gets larger."""
    model = Several(some=Weighted(function))
    exported = ExecutorchExporter().export(model, *tokens((2, 3)), DYNAMIC)
    for given in tokens((1, 1), (2, 3), (1, 2), (8, 40), (1, 1), (7, 64)):
        assert_same(exported, model, given, atol=1e-5, rtol=1e-5)


def test_what_is_computed_of_weights_alone_is_a_weight() -> None:
    model = Several(
        norm=Weighted(lambda x, w: x * (1 + w.float())), scaled=Weighted(lambda x, w: x * w.exp().neg())
    )
    taken, left = check(model, *tokens(*SHAPES), atol=1e-5, rtol=1e-5)
    assert not {"aten::add.Tensor", "aten::exp", "aten::neg"} & set(taken)
    assert not kernels(left, "add", "exp", "neg")


def test_mean_of_images() -> None:
    """XNNPACK pools with its channels last, alone in a delegate as well as behind a convolution."""
    model = Several(
        alone=lambda x: x.mean((-1, -2), keepdim=True),
        scaled=lambda x: (x * 2).mean((-2, -1), keepdim=True) + 1,
        layer=nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1)),
    )
    check(model, *images((1, 3, 8, 8), (3, 3, 8, 8)), config=ROWS, atol=1e-5, rtol=1e-5)
