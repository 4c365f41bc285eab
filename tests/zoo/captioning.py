"""Image to text: captioning, matching, reading."""

# ruff: noqa: C408 - as calls of dict, the formatter keeps several options on one line

from __future__ import annotations

from typing import Any

import torch
import transformers

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
    ids,
    image,
    make,
    padded,
    prompt,
    rng,
    with_images,
)
from .vision import VIT

_BLIP_TXT = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    encoder_hidden_size=32,
    intermediate_size=64,
    projection_dim=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    bos_token_id=BOS,
    eos_token_id=EOS,
    pad_token_id=PAD,
    sep_token_id=EOS,
)
_BLIP_VIS = dict(
    hidden_size=32,
    intermediate_size=64,
    projection_dim=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=32,
    patch_size=16,
)


@case("blip", "image-to-text", "multimodal")
def blip() -> Built:
    cfg = config(
        "blip", text_config=_BLIP_TXT, vision_config=_BLIP_VIS, projection_dim=16, image_text_hidden_size=16
    )
    model = make("BlipForConditionalGeneration", cfg)
    return Built(
        model, lambda b, s: {**padded(b, s), "pixel_values": image(b, 32)}, {"pixel_values": image(1, 32)}
    )


@case("blip_itm", "image-text-matching", "multimodal")
def blip_itm() -> Built:
    cfg = config(
        "blip", text_config=_BLIP_TXT, vision_config=_BLIP_VIS, projection_dim=16, image_text_hidden_size=16
    )
    model = make("BlipForImageTextRetrieval", cfg)
    return Built(model, lambda b, s: {**padded(b, s), "pixel_values": image(b, 32)})


@case("blip_2", "image-to-text", "multimodal")
def blip_2() -> Built:
    cfg = config(
        "blip-2",
        vision_config=dict(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=32,
            patch_size=16,
        ),
        qformer_config=dict(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            encoder_hidden_size=32,
            cross_attention_frequency=1,
        ),
        text_config=dict(
            model_type="opt",
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=64,
            max_position_embeddings=128,
            word_embed_proj_dim=32,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        ),
        num_query_tokens=4,
        image_token_index=IMG_TOKEN,
    )
    model = make("Blip2ForConditionalGeneration", cfg)
    return Built(
        model,
        lambda b, s: {**with_images(b, s, 4), "pixel_values": image(b, 32)},
        {**with_images(1, 5, 4), "pixel_values": image(1, 32)},
    )


@case("pix2struct", "image-to-text", "multimodal")
def pix2struct() -> Built:
    cfg = config(
        "pix2struct",
        text_config=dict(
            vocab_size=VOCAB,
            hidden_size=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=8,
            decoder_start_token_id=PAD,
            pad_token_id=PAD,
            eos_token_id=EOS,
        ),
        vision_config=dict(
            hidden_size=32,
            patch_embed_hidden_size=48,
            d_ff=64,
            d_kv=8,
            num_hidden_layers=2,
            num_attention_heads=4,
            seq_len=64,
        ),
    )
    model = make("Pix2StructForConditionalGeneration", cfg)

    def patches(batch: int, count: int = 10) -> Inputs:
        flat = torch.randn(batch, count, 50, generator=rng(batch))
        flat[:, :, 0] = torch.arange(count) // 4 + 1
        flat[:, :, 1] = torch.arange(count) % 4 + 1
        mask = torch.ones(batch, count)
        mask[1:, count - 2 :] = 0
        flat[1:, count - 2 :] = 0
        return {"flattened_patches": flat, "attention_mask": mask}

    return Built(model, lambda b, s: {**patches(b, s - 2), "decoder_input_ids": ids(b, s - 6)}, patches(1))


def _trocr_config() -> Any:
    return config(
        "trocr",
        vocab_size=VOCAB,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        cross_attention_hidden_size=32,
    )


@case("trocr", "image-to-text", "multimodal")
def trocr() -> Built:
    decoder = _trocr_config()
    decoder.is_decoder = decoder.add_cross_attention = True
    cfg = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(config("vit", **VIT), decoder)
    cfg.decoder_start_token_id, cfg.pad_token_id, cfg.eos_token_id = BOS, PAD, EOS
    model = make("VisionEncoderDecoderModel", cfg)
    model.generation_config.decoder_start_token_id = BOS
    model.generation_config.pad_token_id = PAD
    return Built(
        model,
        lambda b, s: {"pixel_values": image(b, 32), "decoder_input_ids": ids(b, s - 4)},
        {"pixel_values": image(1, 32)},
    )


@case("git", "image-to-text", "multimodal")
def git() -> Built:
    cfg = config(
        "git",
        vision_config=dict(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=32,
            patch_size=16,
        ),
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    model = make("GitForCausalLM", cfg)
    return Built(
        model,
        lambda b, s: {**padded(b, s), "pixel_values": image(b, 32)},
        {**prompt(), "pixel_values": image(1, 32)},
    )
