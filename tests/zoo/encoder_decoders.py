"""Encoder-decoders over text and speech."""

# ruff: noqa: C408 - as calls of dict, the formatter keeps several options on one line

from __future__ import annotations

import torch

from .cases import (
    BOS,
    EOS,
    PAD,
    VOCAB,
    Built,
    Inputs,
    Options,
    case,
    config,
    ids,
    make,
    padded,
    prompt,
    right_mask,
    rng,
)
from .decoders import SPECIAL

_S2S = dict(
    vocab_size=VOCAB,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    max_position_embeddings=64,
    decoder_start_token_id=BOS,
    **SPECIAL,
)
_T5 = dict(
    vocab_size=VOCAB,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_heads=4,
    relative_attention_num_buckets=8,
    decoder_start_token_id=PAD,
    pad_token_id=PAD,
    eos_token_id=EOS,
)

_ENCDEC: dict[str, tuple[str, str, Options]] = {
    "t5": ("t5", "T5ForConditionalGeneration", _T5),
    "bart": ("bart", "BartForConditionalGeneration", {**_S2S, "forced_eos_token_id": None}),
    "marian": ("marian", "MarianMTModel", {**_S2S, "forced_eos_token_id": None}),
    "mbart": ("mbart", "MBartForConditionalGeneration", {**_S2S, "forced_eos_token_id": None}),
    "m2m_100": ("m2m_100", "M2M100ForConditionalGeneration", _S2S),
}


def _encdec(name: str, model_type: str, cls: str, kw: Options) -> None:
    @case(name, "text2text-generation", "enc-dec")
    def builder() -> Built:
        model = make(cls, config(model_type, **kw))

        def inputs(batch: int, seq: int) -> Inputs:
            tgt = seq - 4
            return {**padded(batch, seq), "decoder_input_ids": ids(batch, tgt)}

        return Built(model, inputs, prompt(6))


for _name, _spec in _ENCDEC.items():
    _encdec(_name, *_spec)


@case("bart_seqcls", "sequence-classification", "enc-dec")
def bart_seqcls() -> Built:
    model = make("BartForSequenceClassification", config("bart", **{**_S2S, "num_labels": 3}))

    def inputs(batch: int, seq: int) -> Inputs:
        out = padded(batch, seq)
        out["input_ids"][:, 5] = EOS
        return out

    return Built(model, inputs)


@case("whisper", "automatic-speech-recognition", "enc-dec")
def whisper() -> Built:
    cfg = config(
        "whisper",
        **{k: v for k, v in _S2S.items() if k != "max_position_embeddings"},
        num_mel_bins=16,
        max_source_positions=30,
        max_target_positions=40,
        begin_suppress_tokens=None,
    )
    model = make("WhisperForConditionalGeneration", cfg)

    def feats(batch: int) -> torch.Tensor:
        return torch.randn(batch, 16, 60, generator=rng(batch))

    return Built(
        model,
        lambda b, s: {"input_features": feats(b), "decoder_input_ids": ids(b, s - 6)},
        {"input_features": feats(1)},
    )


@case("speech_to_text", "automatic-speech-recognition", "enc-dec")
def speech_to_text() -> Built:
    cfg = config(
        "speech_to_text",
        **{k: v for k, v in _S2S.items() if k != "max_position_embeddings"},
        num_conv_layers=2,
        conv_kernel_sizes=[3, 3],
        conv_channels=32,
        input_feat_per_channel=16,
        max_source_positions=200,
        max_target_positions=64,
    )
    model = make("Speech2TextForConditionalGeneration", cfg)

    def inputs(batch: int, seq: int) -> Inputs:
        frames = 4 * seq
        return {
            "input_features": torch.randn(batch, frames, 16, generator=rng(batch, seq)),
            "attention_mask": right_mask(batch, frames, step=5),
            "decoder_input_ids": ids(batch, seq - 6),
        }

    gen = inputs(1, 12)
    gen.pop("decoder_input_ids")
    return Built(model, inputs, gen)


@case("moonshine", "automatic-speech-recognition", "enc-dec")
def moonshine() -> Built:
    cfg = config(
        "moonshine",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        max_position_embeddings=64,
        decoder_start_token_id=BOS,
        **SPECIAL,
    )
    model = make("MoonshineForConditionalGeneration", cfg)

    def inputs(batch: int, seq: int) -> Inputs:
        samples = 500 * seq
        return {
            "input_values": torch.randn(batch, samples, generator=rng(batch, seq)),
            "attention_mask": right_mask(batch, samples, step=900),
            "decoder_input_ids": ids(batch, seq - 6),
        }

    gen = inputs(1, 12)
    gen.pop("decoder_input_ids")
    return Built(model, inputs, gen)
