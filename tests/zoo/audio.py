"""Audio models: recognition, classification, codecs, vocoders, speech."""

# ruff: noqa: C408 - as calls of dict, the formatter keeps several options on one line

from __future__ import annotations

import torch

from .cases import Built, Inputs, Options, case, config, make, padded, right_mask, rng

_WAV = dict(
    vocab_size=32,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    conv_dim=[16, 16, 16],
    conv_stride=[5, 2, 2],
    conv_kernel=[10, 3, 3],
    num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=2,
    codevector_dim=16,
    proj_codevector_dim=16,
    classifier_proj_size=16,
    layerdrop=0.0,
)


def _wave(name: str, model_type: str, cls: str, task: str, kw: Options) -> None:
    @case(name, task, "audio")
    def builder() -> Built:
        model = make(cls, config(model_type, **kw))

        def inputs(batch: int, seq: int) -> Inputs:
            samples = 50 * seq
            return {
                "input_values": torch.randn(batch, samples, generator=rng(batch, seq)),
                "attention_mask": right_mask(batch, samples, step=90),
            }

        return Built(model, inputs, size=12, alt=(3, 15))


for _name, _spec in {
    "wav2vec2": ("wav2vec2", "Wav2Vec2ForCTC", "ctc", _WAV),
    "wav2vec2_seqcls": (
        "wav2vec2",
        "Wav2Vec2ForSequenceClassification",
        "audio-classification",
        {**_WAV, "feat_extract_norm": "layer", "do_stable_layer_norm": True, "num_labels": 4},
    ),
    "hubert": (
        "hubert",
        "HubertForCTC",
        "ctc",
        {k: v for k, v in _WAV.items() if not k.endswith("codevector_dim")},
    ),
}.items():
    _wave(_name, *_spec)


@case("wav2vec2_bert", "ctc", "audio")
def wav2vec2_bert() -> Built:
    cfg = config(
        "wav2vec2-bert",
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        feature_projection_input_dim=16,
        conv_depthwise_kernel_size=5,
        left_max_position_embeddings=8,
        right_max_position_embeddings=4,
        layerdrop=0.0,
    )
    model = make("Wav2Vec2BertForCTC", cfg)
    return Built(
        model,
        lambda b, s: {
            "input_features": torch.randn(b, s, 16, generator=rng(b, s)),
            "attention_mask": right_mask(b, s),
        },
    )


@case("ast", "audio-classification", "audio")
def ast() -> Built:
    cfg = config(
        "audio-spectrogram-transformer",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        patch_size=4,
        frequency_stride=4,
        time_stride=4,
        max_length=24,
        num_mel_bins=16,
        num_labels=4,
    )
    model = make("ASTForAudioClassification", cfg)
    return Built(model, lambda b, s: {"input_values": torch.randn(b, 24, 16, generator=rng(b))})


@case("encodec", "audio-codec", "audio")
def encodec() -> Built:
    cfg = config(
        "encodec",
        target_bandwidths=[30.0],
        sampling_rate=24000,
        hidden_size=16,
        num_filters=4,
        upsampling_ratios=[4, 2],
        codebook_size=32,
        num_lstm_layers=1,
    )
    model = make("EncodecModel", cfg)

    def inputs(batch: int, seq: int) -> Inputs:
        samples = 16 * seq
        return {
            "input_values": torch.randn(batch, 1, samples, generator=rng(batch, seq)),
            "padding_mask": torch.ones(batch, 1, samples, dtype=torch.long),
        }

    return Built(model, inputs)


@case("univnet", "vocoder", "audio")
def univnet() -> Built:
    cfg = config(
        "univnet",
        model_in_channels=8,
        model_hidden_channels=8,
        num_mel_bins=16,
        resblock_kernel_sizes=[3, 3],
        resblock_stride_sizes=[4, 4],
        resblock_dilation_sizes=[[1, 3], [1, 3]],
        kernel_predictor_num_blocks=1,
        kernel_predictor_hidden_channels=8,
    )
    model = make("UnivNetModel", cfg)
    return Built(
        model,
        lambda b, s: {
            "input_features": torch.randn(b, s, 16, generator=rng(b, s)),
            "noise_sequence": torch.randn(b, s, 8, generator=rng(b, s, 1)),
        },
    )


@case("vits", "text-to-waveform", "audio")
def vits() -> Built:
    cfg = config(
        "vits",
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=32,
        flow_size=16,
        spectrogram_bins=9,
        upsample_initial_channel=16,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
        prior_encoder_num_flows=1,
        prior_encoder_num_wavenet_layers=1,
        posterior_encoder_num_wavenet_layers=1,
        duration_predictor_num_flows=1,
        depth_separable_num_layers=1,
        noise_scale=0.0,
        noise_scale_duration=0.0,
        use_stochastic_duration_prediction=False,
    )
    model = make("VitsModel", cfg)
    return Built(model, lambda b, s: padded(b, s, vocab=40))
