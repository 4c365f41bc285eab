"""Windowed vision attention: the sizes of padded feature maps, written so that they simplify."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from polyport.patching import Patch, Target
from polyport_dynamo.fixes.scope import uses

_MODELS = {
    "swin.modeling_swin": "Swin",
    "swinv2.modeling_swinv2": "Swinv2",
    "maskformer.modeling_maskformer_swin": "MaskFormerSwin",
    "donut.modeling_donut_swin": "DonutSwin",
}


def _to_windows(_: Callable[..., Any]) -> Callable[..., Any]:
    def maybe_pad(self: Any, hidden_states: torch.Tensor, height: Any, width: Any) -> Any:
        window = self.window_size
        right = window * ((width + window - 1) // window) - width
        bottom = window * ((height + window - 1) // window) - height
        pads = (0, 0, 0, right, 0, bottom)
        return torch.nn.functional.pad(hidden_states, pads), pads

    return maybe_pad


def _to_patches(_: Callable[..., Any]) -> Callable[..., Any]:
    def maybe_pad(self: Any, pixel_values: torch.Tensor, height: Any, width: Any) -> torch.Tensor:
        rows, columns = self.patch_size
        right = columns * ((width + columns - 1) // columns) - width
        bottom = rows * ((height + rows - 1) // rows) - height
        return torch.nn.functional.pad(pixel_values, (0, right, 0, bottom))

    return maybe_pad


def _to_pairs(_: Callable[..., Any]) -> Callable[..., Any]:
    def maybe_pad(_: Any, feature: torch.Tensor, height: Any, width: Any) -> torch.Tensor:
        right, bottom = 2 * ((width + 1) // 2) - width, 2 * ((height + 1) // 2) - height
        return torch.nn.functional.pad(feature, (0, 0, 0, right, 0, bottom))

    return maybe_pad


def _patch(module: str, prefix: str) -> Patch:
    path = f"transformers.models.{module}"
    return Patch(
        id=f"transformers-window-padding-{prefix.lower()}",
        targets=(
            Target(f"{path}:{prefix}Layer.maybe_pad", _to_windows, optional=True),
            Target(f"{path}:{prefix}PatchEmbeddings.maybe_pad", _to_patches, optional=True),
            Target(f"{path}:{prefix}PatchMerging.maybe_pad", _to_pairs, optional=True),
        ),
        reason=(
            "Feature maps are padded to whole windows by (w - n % w) % w. The shape solver can't see that the sum is a "
            "multiple of w, and a trace with an open image size takes more than a minute and refuses odd sizes. "
            "w * ((n + w - 1) // w) is the same number, and simplifies."
        ),
        upstream="unreported",
        affects={"transformers": ">=5.20,<6"},
        reproduce=_reproducer(path, prefix),
        applies=uses(path),
    )


def _reproducer(path: str, prefix: str) -> Callable[[], None]:
    """Checks that the padded size, as torch.export sees it, is a plain multiple of the window."""

    def reproduce() -> None:
        import importlib

        layer = getattr(importlib.import_module(path), f"{prefix}Layer")

        class Padded(torch.nn.Module):
            window_size = 4

            def forward(self, image: torch.Tensor) -> torch.Tensor:
                padded: torch.Tensor = layer.maybe_pad(self, image, image.shape[1], image.shape[2])[0]
                return padded

        auto = torch.export.Dim.AUTO
        program = torch.export.export(
            Padded(), (torch.zeros(2, 9, 10, 3),), dynamic_shapes={"image": {1: auto, 2: auto}}
        )
        size = next(iter(reversed(program.graph.nodes))).args[0][0].meta["val"].shape[1]
        if "Mod" in str(size.node.expr):
            raise AssertionError(
                f"the padded height is {size.node.expr}, which takes the shape solver minutes"
            )

    return reproduce


PATCHES = tuple(_patch(module, prefix) for module, prefix in _MODELS.items())
