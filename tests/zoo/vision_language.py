"""Vision-language models: image features merged into a language model's embeddings."""

# ruff: noqa: C408 - as calls of dict, the formatter keeps several options on one line

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .cases import (
    BOS,
    EOS,
    IMG_TOKEN,
    PAD,
    VOCAB,
    Built,
    Inputs,
    Options,
    case,
    config,
    image,
    make,
    rng,
    with_images,
)
from .decoders import LLAMA_TEXT, LM, LM_HEAD_DIM, QWEN_TEXT, SLIDING

_CLIP_TOWER = dict(
    model_type="clip_vision_model",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    image_size=32,
    patch_size=16,
    projection_dim=32,
)
_SIGLIP_TOWER = dict(
    model_type="siglip_vision_model",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=32,
    patch_size=16,
    vision_use_head=False,
)


def _vlm(name: str, cls: str, cfg: Callable[[], Any], count: int, pixels: Callable[[int], Inputs]) -> None:
    """A VLM whose every row holds one image of `count` tokens; `pixels(batch)` gives the image tensors."""

    @case(name, "image-text-to-text", "multimodal")
    def builder() -> Built:
        model = make(cls, cfg())
        return Built(
            model,
            lambda b, s: {**with_images(b, s, count), **pixels(b)},
            {**with_images(1, 5, count), **pixels(1)},
        )


_vlm(
    "llava",
    "LlavaForConditionalGeneration",
    lambda: config(
        "llava",
        vision_config=_CLIP_TOWER,
        text_config=LLAMA_TEXT,
        image_token_index=IMG_TOKEN,
        image_seq_length=4,
    ),
    4,
    lambda b: {"pixel_values": image(b, 32)},
)

# 32x48 image on a [[32, 64]] grid: base 2x2 tokens, plus the unpadded 2x4 grid with a newline per row.
_vlm(
    "llava_next",
    "LlavaNextForConditionalGeneration",
    lambda: config(
        "llava_next",
        vision_config=_CLIP_TOWER,
        text_config=LLAMA_TEXT,
        image_token_index=IMG_TOKEN,
        image_seq_length=4,
        image_grid_pinpoints=[[32, 64]],
    ),
    4 + 2 * (4 + 1),
    lambda b: {
        "pixel_values": image(3 * b, 32).reshape(b, 3, 3, 32, 32),
        "image_sizes": torch.tensor([[32, 64]] * b),
    },
)

_vlm(
    "paligemma",
    "PaliGemmaForConditionalGeneration",
    lambda: config(
        "paligemma",
        vision_config={**_SIGLIP_TOWER, "projection_dim": 32},
        text_config=dict(model_type="gemma", **LM_HEAD_DIM),
        image_token_index=IMG_TOKEN,
        projection_dim=32,
        hidden_size=32,
    ),
    4,
    lambda b: {"pixel_values": image(b, 32)},
)

_vlm(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    lambda: config(
        "gemma3",
        vision_config={**_SIGLIP_TOWER, "patch_size": 8},
        text_config=dict(
            model_type="gemma3_text",
            **{**LM_HEAD_DIM, "sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": SLIDING},
        ),
        mm_tokens_per_image=4,
        boi_token_index=101,
        eoi_token_index=102,
        image_token_index=IMG_TOKEN,
    ),
    4,
    lambda b: {"pixel_values": image(b, 32)},
)

_IDEFICS_VIS = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=32,
    patch_size=8,
)


def _idefics(name: str, cls: str) -> None:
    _vlm(
        name,
        cls,
        lambda: config(
            name, vision_config=_IDEFICS_VIS, text_config=LLAMA_TEXT, image_token_id=IMG_TOKEN, scale_factor=2
        ),
        4,
        lambda b: {
            "pixel_values": image(b, 32)[:, None],
            "pixel_attention_mask": torch.ones(b, 1, 32, 32, dtype=torch.long),
        },
    )


_idefics("idefics3", "Idefics3ForConditionalGeneration")
_idefics("smolvlm", "SmolVLMForConditionalGeneration")

_vlm(
    "internvl",
    "InternVLForConditionalGeneration",
    lambda: config(
        "internvl",
        vision_config=dict(
            model_type="internvl_vision",
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=[32, 32],
            patch_size=[8, 8],
        ),
        text_config=QWEN_TEXT,
        image_token_id=IMG_TOKEN,
        image_seq_length=4,
        downsample_ratio=0.5,
    ),
    4,
    lambda b: {"pixel_values": image(b, 32)},
)


_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


def _qwen_pixels(batch: int, channels_size: int = 3 * 2 * 4 * 4) -> Inputs:
    """One 4x4-patch image per row (2x2 merged: 4 tokens)."""
    return {
        "pixel_values": torch.randn(16 * batch, channels_size, generator=rng(batch)),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * batch),
    }


def _qwen_vlm(name: str, cls: str, vision: Options) -> None:
    @case(name, "image-text-to-text", "multimodal")
    def builder() -> Built:
        cfg = config(
            name,
            vision_config=vision,
            text_config=dict(**LM, rope_parameters=_MROPE),
            image_token_id=IMG_TOKEN,
            video_token_id=101,
            vision_start_token_id=102,
            vision_end_token_id=103,
        )
        model = make(cls, cfg)

        def inputs(batch: int, seq: int) -> Inputs:
            text = with_images(batch, seq, 4)
            text["mm_token_type_ids"] = (text["input_ids"] == IMG_TOKEN).long()
            return {**text, **_qwen_pixels(batch)}

        return Built(model, inputs, inputs(1, 5))


_qwen_vlm(
    "qwen2_vl",
    "Qwen2VLForConditionalGeneration",
    dict(
        depth=2,
        embed_dim=32,
        hidden_size=32,
        mlp_ratio=2,
        num_heads=4,
        patch_size=4,
        spatial_merge_size=2,
        temporal_patch_size=2,
    ),
)
_qwen_vlm(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    dict(
        depth=2,
        hidden_size=32,
        intermediate_size=64,
        num_heads=4,
        patch_size=4,
        spatial_merge_size=2,
        temporal_patch_size=2,
        window_size=8,
        out_hidden_size=32,
        fullatt_block_indexes=[1],
    ),
)


@case("mllama", "image-text-to-text", "multimodal")
def mllama() -> Built:
    cfg = config(
        "mllama",
        vision_config=dict(
            hidden_size=32,
            num_hidden_layers=2,
            num_global_layers=1,
            attention_heads=4,
            intermediate_size=64,
            vision_output_dim=96,
            image_size=32,
            patch_size=16,
            max_num_tiles=2,
            intermediate_layers_indices=[0, 1],
            supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]],
        ),
        text_config=dict(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            max_position_embeddings=128,
            cross_attention_layers=[1],
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        image_token_index=IMG_TOKEN,
    )
    model = make("MllamaForConditionalGeneration", cfg)

    def inputs(batch: int, seq: int) -> Inputs:
        text = with_images(batch, seq, 1)
        length = text["input_ids"].shape[1]
        cross = torch.ones(batch, length, 1, 2, dtype=torch.long)
        cross[:, 0] = 0
        return {
            **text,
            "pixel_values": image(2 * batch, 32).reshape(batch, 1, 2, 3, 32, 32),
            "aspect_ratio_ids": torch.full((batch, 1), 2),
            "aspect_ratio_mask": torch.ones(batch, 1, 2, dtype=torch.long),
            "cross_attention_mask": cross,
        }

    return Built(model, inputs, inputs(1, 5))
