"""Time series, control, biology."""

from __future__ import annotations

import torch

from .cases import Built, Inputs, case, config, make, padded, right_mask, rng


@case("patchtst", "time-series-forecasting", "other")
def patchtst() -> Built:
    cfg = config(
        "patchtst",
        num_input_channels=3,
        context_length=32,
        patch_length=8,
        patch_stride=8,
        num_hidden_layers=2,
        d_model=16,
        num_attention_heads=4,
        ffn_dim=32,
        prediction_length=6,
    )
    model = make("PatchTSTForPrediction", cfg)
    return Built(model, lambda b, s: {"past_values": torch.randn(b, 32, 3, generator=rng(b))})


@case("timesfm", "time-series-forecasting", "other")
def timesfm() -> Built:
    cfg = config(
        "timesfm",
        patch_length=8,
        context_length=32,
        horizon_length=8,
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=32,
        head_dim=8,
        num_attention_heads=4,
    )
    model = make("TimesFmModelForPrediction", cfg)
    return Built(
        model,
        lambda b, s: {
            "past_values": torch.randn(b, 32, generator=rng(b)).cumsum(1),
            "freq": torch.zeros(b, dtype=torch.long),
        },
    )


@case("decision_transformer", "reinforcement-learning", "other")
def decision_transformer() -> Built:
    cfg = config(
        "decision_transformer", state_dim=5, act_dim=3, hidden_size=32, max_ep_len=64, n_layer=2, n_head=4
    )
    model = make("DecisionTransformerModel", cfg)

    def inputs(batch: int, seq: int) -> Inputs:
        gen = rng(batch, seq)
        return {
            "states": torch.randn(batch, seq, 5, generator=gen),
            "actions": torch.randn(batch, seq, 3, generator=gen),
            "rewards": torch.randn(batch, seq, 1, generator=gen),
            "returns_to_go": torch.randn(batch, seq, 1, generator=gen),
            "timesteps": torch.arange(seq).repeat(batch, 1),
            "attention_mask": right_mask(batch, seq),
        }

    return Built(model, inputs)


@case("esm", "masked-lm", "other")
def esm() -> Built:
    cfg = config(
        "esm",
        vocab_size=33,
        mask_token_id=32,
        pad_token_id=1,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        position_embedding_type="rotary",
        token_dropout=True,
        emb_layer_norm_before=False,
    )
    model = make("EsmForMaskedLM", cfg)
    return Built(model, lambda b, s: padded(b, s, pad=1, vocab=30, low=4))
