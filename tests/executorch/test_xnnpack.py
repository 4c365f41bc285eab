"""What XNNPACK computes: layers and attention stay inside of delegates, with the same numbers as eager at any size."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from several import Several, images, noise
from several import tokens as tokens_of
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.functional import scaled_dot_product_attention as attention
from transformers import PreTrainedConfig, PreTrainedModel

from polyport_executorch import ExecutorchConfig, ExecutorchExporter
from polyport_executorch.delegation import REPORT

sys.path[:0] = [str(Path(__file__).parents[1])]

import zoo  # noqa: E402

tokens = functools.partial(tokens_of, width=32)
DYNAMIC = ExecutorchConfig(dynamic=True)
ROWS = ExecutorchConfig(dynamic_shapes={"pixel_values": {0: Dim("batch", min=1, max=8)}})
SHAPES = ((1, 5), (3, 9), (2, 2), (2, 1), (1, 1))

Report = dict[str, Any]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Layers have the same weights on each run."""
    torch.manual_seed(0)


def check(
    model: Any,
    sample: dict[str, Any],
    *others: dict[str, Any],
    config: ExecutorchConfig = DYNAMIC,
    atol: float,
    rtol: float,
) -> tuple[Report, Report]:
    """Export with one sample and compare with eager at all of them.

    Returns:
        What XNNPACK computes, and what is left to ExecuTorch's own kernels: operator -> how many.
    """
    exported = ExecutorchExporter().export(model, sample, config)
    for given in (sample, *others):
        with torch.no_grad():
            expected = model(**given)
        torch.testing.assert_close(dict(exported(**given)), dict(expected), atol=atol, rtol=rtol)
    report: Any = exported["model"].metadata.backend[REPORT]
    return report["delegated"].get("XnnpackBackend", {}), report["portable"]


def kernels(left: Report, *names: str) -> list[str]:
    """The kernels that have one of some names in theirs."""
    return [kernel for kernel in left if any(name in kernel for name in names)]


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


# ── attention ───────────────────────────────────────────────────────────────────────────────────────────────────────

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

    def inputs(batch: int, length: int) -> dict[str, Any]:
        ids = torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(batch + length))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}

    exported = ExecutorchExporter().export(model, inputs(1, 6), DYNAMIC)
    for shape in ((1, 6), (1, 1), (3, 17), (2, 3)):
        with torch.no_grad():
            expected = model(**inputs(*shape)).logits
        torch.testing.assert_close(exported(**inputs(*shape)).logits, expected, atol=1e-5, rtol=1e-5)
    report = exported["model"].metadata.backend[REPORT]
    assert report["delegated"]["XnnpackBackend"]["aten::tanh"] >= 3  # two layers, and the logits
    assert not kernels(report["portable"], "softmax", "mm", "tanh", "rsqrt")


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
