"""Positions and windows of packed image patches, which are computed image by image in Python loops."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.nn import functional

from polyport.patching import Patch, Target
from polyport_dynamo.fixes.scope import modules_with

_NAMESPACE = "polyport_dynamo.fixes.namespace:modeling"

#: What the towers call their patches, `[patches, ...]`: all images one after the other.
_PACKED = ("hidden_states", "pixel_values", "pixel_values_videos", "x")


@attrs.frozen
class _Grid:
    """Where each of the packed patches (or merged blocks of them) is; every tensor has one entry per patch.

    Args:
        image: Index of its image.
        start: Number of patches in the images before.
        height: Rows in a frame of its image.
        width: Columns.
        within: Its place within its image.
    """

    image: torch.Tensor
    start: torch.Tensor
    height: torch.Tensor
    width: torch.Tensor
    within: torch.Tensor

    @property
    def frame(self) -> torch.Tensor:
        """Index of its frame within its image."""
        return self.within // (self.height * self.width)


def _grid(grid_thw: torch.Tensor, total: Any) -> _Grid:
    """Look up each of `total` patches in the table of `(frames, height, width)` per image."""
    counts = grid_thw[:, 0] * grid_thw[:, 1] * grid_thw[:, 2]
    ends = counts.cumsum(0)
    place = torch.arange(total, device=grid_thw.device)
    # repeating each image's numbers would make a size that depends on values
    image = (place[:, None] >= ends[None, :]).sum(1)
    start = (ends - counts)[image]
    return _Grid(image, start, grid_thw[:, 1][image], grid_thw[:, 2][image], place - start)


def _total(grid_thw: torch.Tensor, depth: int = 2) -> Any:
    """Number of patches of all images.

    While tracing it is read off the patches that the caller of the patched helper holds: computed from the grid, it would be
    a number that nothing ties to the patches.
    """
    packed = next((x for x in map(sys._getframe(depth).f_locals.get, _PACKED) if _open(x)), None)
    if packed is not None:
        return packed.shape[0]
    return (grid_thw[:, 0] * grid_thw[:, 1] * grid_thw[:, 2]).sum().item()


def _open(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1 and isinstance(value.shape[0], torch.SymInt)


def _cell(grid: _Grid, merge: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each patch, where the patches of a block of `merge` x `merge` follow one another."""
    block, inner = grid.within % (grid.height * grid.width) // merge**2, grid.within % merge**2
    across = grid.width // merge
    return block // across * merge + inner // merge, block % across * merge + inner % merge


def _given(kwargs: dict[str, Any] | None, *names: str) -> tuple[Any, ...] | None:
    """What the caller computed before, taken out of its kwargs; None unless it is all there."""
    found = tuple(None if kwargs is None else kwargs.pop(name, None) for name in names)
    return None if any(value is None for value in found) else found


def _position_ids(_: Callable[..., Any]) -> Callable[..., Any]:
    def get_vision_position_ids(
        grid_thw: torch.Tensor,
        spatial_merge_size: Any,
        include_temporal: bool = False,
        kwargs: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        given = _given(kwargs, "position_ids")
        if given is not None:
            return torch.as_tensor(given[0])
        grid = _grid(grid_thw, _total(grid_thw))
        merge = spatial_merge_size[grid.image] if torch.is_tensor(spatial_merge_size) else spatial_merge_size
        cell = _cell(grid, merge)
        return torch.stack((grid.frame, *cell) if include_temporal else cell, dim=-1)

    return get_vision_position_ids


def _window_index(_: Callable[..., Any]) -> Callable[..., Any]:
    def get_vision_window_index(
        grid_thw: torch.Tensor,
        spatial_merge_size: int,
        window_size: int,
        patch_size: int,
        kwargs: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = _given(kwargs, "window_index", "cu_window_seqlens")
        if given is not None:
            return given[0], given[1]
        unit, side = spatial_merge_size**2, window_size // spatial_merge_size // patch_size
        merged = torch.stack(
            [grid_thw[:, 0], grid_thw[:, 1] // spatial_merge_size, grid_thw[:, 2] // spatial_merge_size], 1
        )
        grid = _grid(merged, _total(grid_thw) // unit)
        area = grid.height * grid.width
        row, column = grid.within % area // grid.width, grid.within % grid.width
        # windows at the lower and right edge are smaller
        top, left = row // side * side, column // side * side
        tall, wide = (grid.height - top).clamp(max=side), (grid.width - left).clamp(max=side)
        first = grid.start + grid.frame * area + top * grid.width + left * tall
        place = first + (row - top) * wide + column - left
        order = torch.arange(place.shape[0], device=place.device)
        window_index = torch.zeros_like(place).scatter(0, place, order)
        # an end per block and not per window, since the number of windows depends on the values: the same boundaries
        ends = (first + tall * wide)[window_index] * unit
        return window_index, functional.pad(ends, (1, 0)).to(torch.int32)

    return get_vision_window_index


def _interpolation(_: Callable[..., Any]) -> Callable[..., Any]:
    def get_vision_interpolation_indices_and_weights(
        grid_thw: torch.Tensor,
        num_grid_per_side: int,
        mode: str = "bilinear",
        align_corners: bool = False,
        spatial_merge_size: int = 1,
        padding: str = "border",
        kwargs: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from transformers import vision_utils

        given = _given(kwargs, "interp_indices", "interp_weights")
        if given is not None:
            return given[0], given[1]
        grid = _grid(grid_thw, _total(grid_thw))
        row, column = _cell(grid, spatial_merge_size)
        rows, columns = (
            vision_utils._interpolation_axis_taps_weights(
                index, size, num_grid_per_side, mode, align_corners, padding
            )
            for index, size in ((row, grid.height), (column, grid.width))
        )
        indices = rows[0][:, :, None] * num_grid_per_side + columns[0][:, None, :]
        return indices.flatten(1), (rows[1][:, :, None] * columns[1][:, None, :]).flatten(1)

    return get_vision_interpolation_indices_and_weights


#: Name of a helper in `transformers.vision_utils` -> its replacement, and sample arguments behind the grid.
_HELPERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "get_vision_position_ids": (_position_ids, (2,)),
    "get_vision_window_index": (_window_index, (2, 8, 2)),
    "get_vision_interpolation_indices_and_weights": (_interpolation, (6, "bilinear", True, 2)),
}


def _reproducer(name: str, arguments: tuple[Any, ...]) -> Callable[[], None]:
    """Checks that a helper can be traced for images of any number and size, with the values of the loops."""

    def reproduce() -> None:
        from transformers import vision_utils
        from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
        from transformers.models.qwen3_vl import modeling_qwen3_vl

        module = next(m for m in (modeling_qwen2_5_vl, modeling_qwen3_vl) if hasattr(m, name))

        class Helper(torch.nn.Module):
            def forward(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor) -> Any:
                found = getattr(module, name)(grid_thw, *arguments)
                first = found[0] if isinstance(found, tuple) else found
                return found, hidden_states[: first.shape[0]] + first.reshape(first.shape[0], -1)[:, :1]

        auto = torch.export.Dim.AUTO
        sample = (torch.zeros(112, 4), torch.tensor([[1, 4, 6], [2, 6, 4], [1, 4, 10]]))
        program = torch.export.export(Helper(), sample, dynamic_shapes=({0: auto}, {0: auto}))
        grids = torch.tensor([[3, 6, 10], [1, 12, 4]])
        got = program.module()(torch.zeros(228, 4), grids)[0]
        wanted = getattr(vision_utils, name)(grids, *arguments)
        if isinstance(wanted, torch.Tensor):
            got, wanted = (got,), (wanted,)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a.unique_consecutive(dim=0) if len(a) != len(b) else a, b)

    return reproduce


def _patch(name: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Patch:
    return Patch(
        id=f"transformers-{name.removeprefix('get_').replace('_', '-')}",
        targets=(Target(f"{_NAMESPACE}.{name}", make),),
        reason=(
            "Vision towers that take the patches of all images in one row (Qwen-VL, GLM-4V, and their kin) compute where each "
            "patch is in a loop over the images, or by repeating numbers as often as a value says; neither can be traced "
            "for other images. The replacement looks every patch up in the grids at once."
        ),
        upstream="unreported",
        affects={"transformers": ">=5.20,<6"},
        reproduce=_reproducer(name, arguments),
        applies=modules_with(name),
    )


PATCHES = tuple(_patch(name, make, arguments) for name, (make, arguments) in _HELPERS.items())
