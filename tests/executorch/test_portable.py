"""Operators written for ExecuTorch's own kernels, whatever takes the rest: the same numbers as eager at any size."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers.integrations.moe  # registers its operators  # noqa: F401
from several import DYNAMIC, SHAPES, Several, check, check_logits, images, noise
from several import tokens as tokens_of
from torch import Tensor, nn
from torch.export import Dim

from polyport.errors import ExportError
from polyport_executorch import ExecutorchConfig, ExecutorchExporter

sys.path[:0] = [str(Path(__file__).parents[1])]

import zoo  # noqa: E402

tokens = functools.partial(tokens_of, width=6)
BATCH = Dim("batch", min=1, max=8)


def open_axes(**axes: Dim) -> ExecutorchConfig:
    """Images whose axes of these numbers (`axis_0`) vary."""
    shapes = {"pixel_values": {int(name.removeprefix("axis_")): dim for name, dim in axes.items()}}
    return ExecutorchConfig(dynamic_shapes=shapes)


# ── orders and counts ───────────────────────────────────────────────────────────────────────────────────────────────


def test_sort() -> None:
    """Both directions, along axes that vary and that don't; no two numbers are equal, so that there is one order."""
    model = Several(
        up=lambda x: x.sort(1).values,
        up_indices=lambda x: x.sort(1).indices,
        down=lambda x: x.sort(1, descending=True).values,
        down_indices=lambda x: torch.sort(x, dim=1, descending=True).indices,
        last=lambda x: sum(x.sort(-1)),
        rows=lambda x: x.sort(0, descending=True).values,
        order=lambda x: x.argsort(1),
        order_down=lambda x: x.argsort(-1, descending=True),
        whole=lambda x: (x * 1e6).long().argsort(1),
    )
    check(model, *tokens(*SHAPES), atol=1e-6, rtol=1e-6)


def test_sort_with_equal_numbers() -> None:
    """Of equal ones any may be first, but each is there once."""

    def grouped(x: Tensor) -> Tensor:
        kinds = (x[..., 0] > 0).long()
        order = kinds.argsort(1)
        return torch.cat((kinds.gather(1, order), order.sort(1).values), -1)

    check(Several(grouped=grouped), *tokens(*SHAPES), atol=0, rtol=0)


def test_sort_that_keeps_the_order_of_equal_numbers() -> None:
    """No kernel does: it is refused, and no other order given for it."""
    model = Several(stable=lambda x: torch.argsort(x, dim=1, stable=True))
    with pytest.raises(ExportError, match="no kernel for aten::sort"):
        ExecutorchExporter().export(model, *tokens((1, 5)), DYNAMIC)


def test_counts() -> None:
    """How many there are of each kind, as routers count their tokens; those that are no kind don't count."""

    def kinds(x: Tensor) -> Tensor:
        return (x[..., 0].flatten() * 3).round()

    model = Several(
        inside=lambda x: torch.histc(kinds(x).clamp(0, 3), bins=4, min=0, max=3),
        outside=lambda x: torch.histc(kinds(x), bins=4, min=0, max=3),
        whole=lambda x: torch.histc(kinds(x).clamp(0, 7).int().float(), bins=8, min=0, max=7).int(),
    )
    check(model, *tokens(*SHAPES, (8, 60)), atol=0, rtol=0)


def test_buckets() -> None:
    """Between which borders numbers lie, with numbers that are borders."""
    borders = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0])

    def halves(x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    model = Several(
        left=lambda x: torch.bucketize(halves(x), borders),
        right=lambda x: torch.bucketize(halves(x), borders, right=True),
        narrow=lambda x: torch.bucketize(x, borders, out_int32=True),
    )
    check(model, *tokens(*SHAPES), atol=0, rtol=0)


# ── experts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """The rows of a token go through the matrix that two of its numbers choose."""

    def __init__(self, *, left: bool = False, turned: bool = False) -> None:
        super().__init__()
        weight = noise(4, 5, 6, seed=3) if turned else noise(4, 6, 5, seed=3)
        self.weight, self.left, self.turned = nn.Parameter(weight), left, turned

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        kinds = (rows[:, 0] > 0).long() * 2 + (rows[:, 1] > 0).long()
        order = kinds.argsort()
        ends = torch.histc(kinds.float(), bins=4, min=0, max=3).cumsum(0).to(torch.int32)
        if self.left:
            ends = torch.minimum(ends, ends[1])
        weight = self.weight.transpose(1, 2) if self.turned else self.weight
        made = grouped(rows[order], weight, ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return made[back].view(x.shape[0], x.shape[1], 5)


def test_experts() -> None:
    """Any number of tokens for each expert, none as well; rows that are left over are zeros."""
    model = Several(
        experts=Experts(),
        turned=Experts(turned=True),
        left=Experts(left=True),
        computed=lambda x: grouped(
            x.flatten(0, 1),
            torch.stack([x[0, :1].mT @ x[0, :1] + i for i in range(3)]),
            torch.tensor([1, 1, 3]),
        ),
    )
    one, others = tokens((1, 5)), tokens((3, 9), (2, 3), (3, 1))
    for kind in range(4):  # all tokens to one expert
        x = noise(2, 4, 6, seed=kind)
        x[..., 0], x[..., 1] = (kind // 2) * 2.0 - 1, (kind % 2) * 2.0 - 1
        others.append({"inputs_embeds": x})
    check(model, *one, *others, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_mixture_of_experts() -> None:
    """A layer of four experts, of which a lone token leaves out two, beside one that all tokens go through."""
    model, _, _ = zoo.build("qwen2_moe")
    model.model.layers = model.model.layers[:1]

    _, left = check_logits(model)
    # the matrices of the experts are weights of layers, and no expert is left to the plain kernels
    assert not any("mm" in kernel or "linear" in kernel for kernel in left)


# ── memory that is written to ───────────────────────────────────────────────────────────────────────────────────────


def filled_like(x: Tensor) -> Tensor:
    made = torch.empty_like(x)
    made[:, torch.arange(x.shape[1])] = x * 2
    return made


def filled_new(x: Tensor) -> Tensor:
    made = x.new_empty((x.shape[1], x.shape[0], 6))
    made[torch.arange(x.shape[1])] = x.flip(-1).transpose(0, 1)
    return made


def filled_numbers(x: Tensor) -> Tensor:
    made = torch.empty(x.shape[0], x.shape[1], dtype=torch.int64)
    places = torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])[None]
    return made.index_put_(places, (x[..., 0] * 10).long())


def undone(x: Tensor) -> Tensor:
    """Where each place of an order went."""
    order = x[0, :, 0].argsort()
    made = torch.empty_like(order)
    made[order] = torch.arange(order.shape[0])
    return made


def test_memory_that_is_filled() -> None:
    model = Several(like=filled_like, new=filled_new, numbers=filled_numbers, undone=undone)
    check(model, *tokens(*SHAPES), atol=1e-6, rtol=1e-6)


# ── convolutions along three axes ───────────────────────────────────────────────────────────────────────────────────

CLIPS = ((2, 3, 6, 8, 8), (1, 3, 6, 8, 8), (3, 3, 6, 8, 8))


def test_convolution_of_clips() -> None:
    model = Several(
        plain=nn.Conv3d(3, 4, (2, 3, 3)),
        flat=nn.Conv3d(3, 4, (1, 3, 3), padding=(0, 1, 1)),
        strided=nn.Conv3d(3, 4, (3, 2, 2), stride=(2, 2, 1), padding=(0, 0, 1)),
        dilated=nn.Conv3d(3, 6, (2, 2, 2), dilation=(2, 1, 2), groups=3, bias=False),
        patches=nn.Conv3d(3, 5, (2, 4, 4), stride=(2, 4, 4)),
        far=nn.Conv3d(3, 4, (2, 1, 1), dilation=(3, 1, 1), stride=(2, 3, 3)),
    )
    check(model, *images(*CLIPS), config=open_axes(axis_0=BATCH), atol=1e-5, rtol=1e-5)


def test_convolution_of_clips_with_frames_of_zeros() -> None:
    """Padding along the first axis too."""
    model = Several(
        both=nn.Conv3d(3, 4, 3, padding=1),
        deep=nn.Conv3d(3, 6, 3, stride=2, padding=2, dilation=2, groups=3),
        first=nn.Conv3d(3, 4, (2, 3, 3), padding=(1, 0, 0)),
    )
    check(model, *images(*CLIPS), config=open_axes(axis_0=BATCH), atol=1e-5, rtol=1e-5)


def test_convolution_of_clips_of_any_length() -> None:
    """How many frames come out follows from how many go in."""
    model = Several(plain=nn.Conv3d(3, 4, (2, 3, 3)))
    config = open_axes(axis_0=BATCH, axis_2=Dim("frames", min=3, max=16))
    check(model, *images(*CLIPS, (2, 3, 9, 8, 8), (1, 3, 3, 8, 8)), config=config, atol=1e-5, rtol=1e-5)


def test_convolution_of_clips_of_any_area() -> None:
    model = Several(plain=nn.Conv3d(3, 4, (2, 3, 3)))
    config = open_axes(axis_0=BATCH, axis_3=Dim("height", min=4, max=16), axis_4=Dim("width", min=4, max=16))
    check(model, *images(*CLIPS, (2, 3, 6, 9, 5), (1, 3, 6, 4, 16)), config=config, atol=1e-5, rtol=1e-5)


# ── padding ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_padding_that_cuts() -> None:
    """Sizes below zero, alone and beside others, and along an axis that varies."""
    model = Several(
        last=lambda x: nn.functional.pad(x, (-1, -2)),
        before=lambda x: nn.functional.pad(x, (-2, 0)),
        both=lambda x: nn.functional.pad(x * 2, (-1, 2)),
        rows=lambda x: nn.functional.pad(x, (0, 0, -1, 3)),
        mixed=lambda x: nn.functional.pad(x, (1, -1, -1, 0), value=0.5),
        whole=lambda x: nn.functional.pad((x * 10).long(), (-2, 1, 0, 2), value=7),
        truth=lambda x: nn.functional.pad(x > 0, (-1, 2), value=True),
        plain=lambda x: nn.functional.pad(x, (1, 2, 0, 1), value=1.5),
    )
    check(model, *tokens((1, 5), (3, 9), (2, 2), (8, 1)), atol=1e-6, rtol=1e-6)


def test_padding_in_front_of_attention() -> None:
    """What comes out varies as what goes in did, also for what is written for other devices afterwards."""

    def shifted(x: Tensor) -> Tensor:
        heads = nn.functional.pad(x, (0, 0, -1, 1)).unflatten(-1, (4, 8)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads[:, :2], heads[:, 2:], enable_gqa=True)

    check(Several(shifted=shifted), *tokens((2, 5), (3, 9), (1, 2), width=32), atol=1e-5, rtol=1e-5)


# ── tensors whose channels lie last ─────────────────────────────────────────────────────────────────────────────────


def bicubic(x: Tensor) -> Tensor:
    return nn.functional.interpolate(x, size=(10, 12), mode="bicubic")


def test_images_with_their_channels_last() -> None:
    """Tensors that are laid out in another order, by the model or its caller: some kernels compute something else for them."""
    model = Several(
        bicubic=lambda x: bicubic(x.permute(0, 3, 1, 2)),
        bilinear=lambda x: nn.functional.interpolate(x.permute(0, 3, 1, 2), size=(10, 12), mode="bilinear"),
        sequence=lambda x: bicubic(x.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2) * 1.5,
        nearest=lambda x: nn.functional.interpolate(x.permute(0, 3, 1, 2), scale_factor=2, mode="nearest"),
        back=lambda x: nn.functional.interpolate(x.permute(0, 3, 1, 2), size=(3, 5), mode="nearest").permute(
            0, 2, 3, 1
        ),
        mean=lambda x: nn.functional.avg_pool2d(x.to(memory_format=torch.channels_last), 2),
        flat=lambda x: x.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last).flatten(1),
    )
    given = images((1, 4, 6, 3), (3, 4, 6, 3))
    given.append({"pixel_values": noise(2, 4, 6, 3).to(memory_format=torch.channels_last)})
    check(model, *given, config=open_axes(axis_0=BATCH), atol=1e-5, rtol=1e-5)


# ── sizes that are computed in tensors ──────────────────────────────────────────────────────────────────────────────


class Span(nn.Module):
    """Rows of a table around its middle, as many as there are tokens, and no more than half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(noise(16, 6, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        span = torch.tensor(min(x.size(1), 8))
        rows = self.table[8 - span : span + 8]
        places = torch.clamp(torch.arange(x.size(1)) * 3 - 4, 0, span * 2 - 1)
        return x + rows[places] + rows.sum(0)


def test_sizes_that_are_computed_in_tensors() -> None:
    check(Several(span=Span()), *tokens(*SHAPES, (2, 8), (1, 20)), atol=1e-5, rtol=1e-5)


def test_other_numbers_that_are_computed_in_tensors() -> None:
    model = Several(
        largest=lambda x: x * torch.maximum(torch.tensor(x.size(1)), torch.tensor(4)).item(),
        least=lambda x: x[:, : torch.minimum(torch.tensor(x.size(1)) + 1, torch.tensor(3))].sum(1),
        difference=lambda x: x + (torch.tensor(x.size(1)) - torch.tensor(x.size(0))).item(),
        twice=lambda x: x.sum(1) / (2 * torch.tensor(x.size(1))).item(),
    )
    check(model, *tokens(*SHAPES), atol=1e-5, rtol=1e-5)


def test_powers_of_sizes() -> None:
    """The number of pairs of tokens, as a model that compares all of them has it."""
    model = Several(
        pairs=lambda x: (x[:, :, None] * x[:, None]).flatten(1, 2).sum(1),
        ones=lambda x: torch.ones(x.size(1) ** 3).sum() + x.sum(1),
        rows=lambda x: torch.arange(x.size(1) ** 2)[:: x.size(1)] + x.sum((0, 2)),
    )
    check(
        model,
        *tokens(*SHAPES),
        config=ExecutorchConfig(dynamic=True, max_sizes={"sequence": 9}),
        atol=1e-4,
        rtol=1e-5,
    )


def test_roots_of_sizes_are_refused() -> None:
    model = Several(root=lambda x: x[:, : torch.sym_int(x.size(1) ** 0.5)].sum(1))
    with pytest.raises(
        ExportError, match=r"size as a power \(.* \*\* 0\.5\), and ExecuTorch has no operation for that"
    ):
        ExecutorchExporter().export(model, *tokens((1, 9)), DYNAMIC)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, : (x[0, 0, 0] > 0).long().item()].sum(1),
        lambda x: torch.repeat_interleave((x[0, :, 0] > 0).long()).sum() + x,
    ],
    ids=["slice", "rows"],
)
def test_sizes_that_depend_on_values_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ExportError, match="a size depends on values that the model computes"):
        ExecutorchExporter().export(Several(some=function), *tokens((1, 4)), DYNAMIC)


def test_an_error_blames_no_operator_that_is_rewritten() -> None:
    model = Several(some=lambda x: x.sort(1).values[:, : (x[0, 0, 0] > 0).long().item()].sum(1))
    with pytest.raises(ExportError, match="a size depends on values") as caught:
        ExecutorchExporter().export(model, *tokens((1, 4)), DYNAMIC)
    assert "sort" not in str(caught.value)
