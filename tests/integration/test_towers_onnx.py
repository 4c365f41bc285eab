"""Vision towers that take the patches of all images in one row, in ONNX Runtime."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from polyport import OnnxConfig, OnnxExporter

sys.path[:0] = [str(Path(__file__).parents[1])]

import zoo  # noqa: E402


def packed(*grids: tuple[int, int, int]) -> zoo.Inputs:
    grid_thw = torch.tensor(grids)
    count = int(grid_thw.prod(-1).sum())
    generator = torch.Generator().manual_seed(count)
    return {"hidden_states": torch.randn(count, 96, generator=generator), "grid_thw": grid_thw}


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_a_tower_of_packed_patches_takes_any_images(name: str) -> None:
    tower = zoo.build(name)[0].model.visual
    tower.window_size = 16  # two by two tokens, where it attends in windows
    exported = OnnxExporter().export(tower, packed((1, 4, 4)), OnnxConfig(dynamic=True))
    for images in [
        packed((1, 4, 4)),
        packed((1, 6, 10)),
        packed((1, 4, 4), (1, 4, 4)),
        packed((1, 10, 14), (3, 6, 4), (1, 2, 2)),
    ]:
        with torch.no_grad():
            wanted = tower(**images)
        found = exported(**images)
        for field in ("last_hidden_state", "pooler_output"):
            torch.testing.assert_close(found[field], wanted[field], rtol=1e-4, atol=1e-5)
