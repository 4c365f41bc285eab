"""Models of several modalities: dual encoders, documents, audio and text."""

# ruff: noqa: C408 - as calls of dict, the formatter keeps several options on one line

from __future__ import annotations

import torch

from .cases import (
    BOS,
    EOS,
    IMG_TOKEN,
    PAD,
    VOCAB,
    Built,
    Inputs,
    case,
    config,
    image,
    make,
    padded,
    rng,
    with_images,
)
from .decoders import QWEN_TEXT
from .text_encoders import ENCODER

_CLIP_VIS = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=32,
    patch_size=16,
    projection_dim=16,
)
_CLIP_TXT = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    projection_dim=16,
    pad_token_id=PAD,
    bos_token_id=BOS,
    eos_token_id=EOS,
)


@case("clip", "zero-shot-image-classification", "multimodal")
def clip() -> Built:
    model = make(
        "CLIPModel", config("clip", text_config=_CLIP_TXT, vision_config=_CLIP_VIS, projection_dim=16)
    )

    def inputs(batch: int, seq: int) -> Inputs:
        text = padded(batch, seq)
        ends = text["attention_mask"].sum(-1) - 1
        text["input_ids"][torch.arange(batch), ends] = EOS
        return {**text, "pixel_values": image(batch, 32)}

    return Built(model, inputs)


@case("siglip", "zero-shot-image-classification", "multimodal")
def siglip() -> Built:
    text = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    vision = {k: v for k, v in _CLIP_VIS.items() if k != "projection_dim"}
    model = make("SiglipModel", config("siglip", text_config=text, vision_config=vision))
    return Built(model, lambda b, s: {**padded(b, s), "pixel_values": image(b, 32)})


@case("vilt", "visual-question-answering", "multimodal")
def vilt() -> Built:
    cfg = config(
        "vilt",
        **ENCODER,
        image_size=32,
        patch_size=8,
        num_labels=4,
        max_image_length=-1,
    )
    model = make("ViltForQuestionAnswering", cfg)
    return Built(
        model,
        lambda b, s: {
            **padded(b, s),
            "pixel_values": image(b, 32),
            "pixel_mask": torch.ones(b, 32, 32, dtype=torch.long),
        },
    )


@case("layoutlm", "token-classification", "multimodal")
def layoutlm() -> Built:
    cfg = config("layoutlm", **ENCODER, max_2d_position_embeddings=64, num_labels=5)
    model = make("LayoutLMForTokenClassification", cfg)

    def inputs(batch: int, seq: int) -> Inputs:
        corner = torch.randint(0, 20, (batch, seq, 2), generator=rng(batch, seq))
        extent = torch.randint(1, 20, (batch, seq, 2), generator=rng(seq, batch))
        return {**padded(batch, seq), "bbox": torch.cat([corner, corner + extent], dim=-1)}

    return Built(model, inputs)


@case("qwen2_audio", "audio-text-to-text", "multimodal")
def qwen2_audio() -> Built:
    cfg = config(
        "qwen2_audio",
        audio_config=dict(
            model_type="qwen2_audio_encoder",
            num_mel_bins=16,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=64,
            d_model=32,
            max_source_positions=24,
        ),
        text_config=QWEN_TEXT,
        audio_token_index=IMG_TOKEN,
    )
    model = make("Qwen2AudioForConditionalGeneration", cfg)

    def inputs(batch: int, seq: int) -> Inputs:  # 48 frames -> 24 after the conv -> 12 after pooling
        return {
            **with_images(batch, seq, 12, masked=batch > 1),
            "input_features": torch.randn(batch, 16, 48, generator=rng(batch)),
            "feature_attention_mask": torch.ones(batch, 48, dtype=torch.long),
        }

    return Built(model, inputs, inputs(1, 5))
