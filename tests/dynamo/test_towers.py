"""Parts of multimodal models, each exported on its own: right at sizes that the sample did not have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from polyport import DynamoConfig, DynamoExporter, ExportedModel, structure

sys.path[:0] = [str(Path(__file__).parents[1])]

import zoo  # noqa: E402

Kwargs = dict[str, Any]


def export(part: torch.nn.Module, sample: Kwargs) -> ExportedModel:
    return DynamoExporter().export(part, sample, DynamoConfig(dynamic=True))


def check(exported: ExportedModel, part: torch.nn.Module, kwargs: Kwargs) -> None:
    """Compare with the part itself, which is given caches of its own."""
    leaves, spec = structure.flatten(kwargs)
    own = structure.unflatten([x.clone() if isinstance(x, torch.Tensor) else x for x in leaves], spec)
    with torch.no_grad():
        wanted = structure.flatten(part(**own))[0]
    given = {name: value for name, value in kwargs.items() if structure.flatten(value)[0]}  # no empty caches
    found = structure.flatten(exported(**given))[0]
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def metadata(exported: ExportedModel) -> Any:
    return next(iter(exported.components.values())).metadata


def packed(*grids: tuple[int, int, int]) -> Kwargs:
    """Patches of images (or videos) of so many frames, rows and columns, one image after the other."""
    grid_thw = torch.tensor(grids)
    count = int(grid_thw.prod(-1).sum())
    generator = torch.Generator().manual_seed(count)
    return {"hidden_states": torch.randn(count, 96, generator=generator), "grid_thw": grid_thw}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_a_tower_of_packed_patches_takes_any_images(name: str, attention: str, tmp_path: Path) -> None:
    tower = zoo.build(name)[0].model.visual
    tower.window_size = 16  # two by two tokens, where it attends in windows
    tower.set_attn_implementation(attention)
    exported = export(tower, packed((1, 4, 4)))
    names = {info.name: info.shape for info in metadata(exported).inputs}
    assert names == {"hidden_states": ("patches", 96), "grid_thw": ("images", 3)}
    exported.save_pretrained(tmp_path / "tower")
    loaded = ExportedModel.from_pretrained(tmp_path / "tower")
    for images in [
        packed((1, 4, 4)),
        packed((1, 6, 10)),
        packed((1, 4, 4), (1, 4, 4)),
        packed((1, 10, 14), (3, 6, 4), (1, 2, 2)),
    ]:
        check(loaded, tower, images)


def images(batch: int, rows: int, columns: int) -> Kwargs:
    """Images of patches of 8 x 8 pixels, all but the first padded."""
    mask = torch.ones(batch, rows, columns, dtype=torch.bool)
    mask[1:, -1:], mask[1:, :, -1:] = False, False
    return {"pixel_values": zoo.cases.image(batch, 8 * rows, 8 * columns), "patch_attention_mask": mask}


def test_a_mask_of_patches_goes_along_with_the_image_size() -> None:
    tower = zoo.build("idefics3")[0].model.vision_model
    exported = export(tower, images(1, 4, 4))
    for batch, rows, columns in [(1, 4, 4), (3, 4, 4), (2, 8, 5), (1, 2, 6)]:
        check(exported, tower, images(batch, rows, columns))


def test_an_audio_tower_takes_several_clips_of_different_lengths() -> None:
    tower = zoo.build("qwen2_audio")[0].model.audio_tower

    def clips(*frames: int) -> Kwargs:
        mask = torch.zeros(len(frames), 1, 24, 24, dtype=torch.bool)
        for row, count in enumerate(frames):
            mask[row, :, :, :count] = True
        return {"input_features": torch.randn(len(frames), 16, 48), "attention_mask": mask}

    exported = export(tower, clips(24, 10))
    for lengths in [(24,), (7,), (24, 10), (5, 24, 9)]:
        check(exported, tower, clips(*lengths))


def causal(batch: int, new: int, past: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """A mask of rank 4 for right-padded rows; with a window, over the keys that its cache keeps."""
    queries, keys = torch.arange(past, past + new)[:, None], torch.arange(past + new)
    seen = (keys <= queries) & ((keys > queries - window) if window else True)
    mask = seen.expand(batch, 1, new, past + new).clone()
    for row in range(1, batch):
        mask[row, ..., past + new - row :] &= torch.eye(new, dtype=torch.bool)[:, -row:]
    kept = past if window is None else min(past, window - 1)
    mask = mask[..., past - kept :]
    return mask if dtype is torch.bool else torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("past", [0, 9])
def test_a_language_model_takes_a_mask_for_each_kind_of_layer(past: int, dtype: torch.dtype) -> None:
    model = zoo.build("gemma3")[0].model.language_model
    model.config.use_cache = True
    window = model.config.sliding_window

    def call(batch: int, new: int, past: int) -> Kwargs:
        cache = DynamicCache(config=model.config)
        if past:
            with torch.no_grad():
                model(inputs_embeds=torch.randn(batch, past, 32), cache=cache)
        return {
            "inputs_embeds": torch.randn(batch, new, 32),
            "attention_mask": {
                "full_attention": causal(batch, new, past, None, dtype),
                "sliding_attention": causal(batch, new, past, window, dtype),
            },
            "position_ids": torch.arange(past, past + new).repeat(batch, 1),
            "cache": cache,
        }

    exported = export(model, call(2, 6, past))
    shapes = {info.name: info.shape for info in metadata(exported).inputs}
    keys = "past+sequence" if past else "sequence"
    assert shapes["attention_mask.full_attention"] == ("batch", 1, "sequence", keys)
    assert shapes["attention_mask.sliding_attention"][3] == (f"past_{window - 1}+sequence" if past else keys)
    for batch, new in [(1, 1), (3, 11), (2, 6)]:
        check(exported, model, call(batch, new, 2 * past))


def test_a_language_model_attends_to_any_number_of_images() -> None:
    model = zoo.build("mllama")[0].model.language_model
    model.config.use_cache = True

    def call(batch: int, length: int, seen: int) -> Kwargs:
        rows = torch.ones(batch, 1, length, 1)
        rows[:, :, 0] = 0
        return {
            "input_ids": torch.randint(3, 90, (batch, length)),
            "attention_mask": torch.ones(batch, length, dtype=torch.long),
            "cross_attention_states": torch.randn(batch, seen, 32),
            "cross_attention_mask": torch.zeros(batch, 1, length, seen),
            "full_text_row_masked_out_mask": rows,
            "cache": DynamicCache(config=model.config),
        }

    exported = export(model, call(1, 6, 10))
    for batch, length, seen in [(1, 6, 10), (3, 11, 20), (2, 5, 5)]:
        check(exported, model, call(batch, length, seen))


def test_a_plain_layer_is_exported_like_a_model() -> None:
    head = torch.nn.Linear(32, 16).eval()
    exported = export(head, {"input": torch.randn(1, 1, 32)})
    assert metadata(exported).inputs[0].shape == ("batch", "sequence", 32)
    assert metadata(exported).outputs[0].name == "output"
    for shape in [(1, 7, 32), (3, 1, 32)]:
        check(exported, head, {"input": torch.randn(shape)})
