"""Language models that are not dense attention: mixture of experts, state space, hybrids."""

from __future__ import annotations

from .cases import (
    VOCAB,
    Options,
)
from .decoders import LM, LM_HEAD_DIM, SLIDING, SPECIAL, causal

_MOE: dict[str, tuple[str, str, Options]] = {
    "mixtral": (
        "mixtral",
        "MixtralForCausalLM",
        {**LM_HEAD_DIM, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {
            **LM,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**LM_HEAD_DIM, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "olmoe": ("olmoe", "OlmoeForCausalLM", {**LM, "num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {
            **LM,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "n_routed_experts": 8,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "qk_nope_head_dim": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        "GptOssForCausalLM",
        {
            **LM_HEAD_DIM,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": SLIDING,
        },
    ),
    "granitemoe": (
        "granitemoe",
        "GraniteMoeForCausalLM",
        {**LM, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}

_SSM: dict[str, tuple[str, str, Options]] = {
    "mamba": (
        "mamba",
        "MambaForCausalLM",
        dict(vocab_size=VOCAB, hidden_size=32, state_size=8, num_hidden_layers=2, **SPECIAL),
    ),
    "mamba2": (
        "mamba2",
        "Mamba2ForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=32,
            state_size=8,
            num_hidden_layers=2,
            num_heads=8,
            head_dim=8,
            n_groups=2,
            chunk_size=8,
            **SPECIAL,
        ),
    ),
    "falcon_mamba": (
        "falcon_mamba",
        "FalconMambaForCausalLM",
        dict(vocab_size=VOCAB, hidden_size=32, state_size=8, num_hidden_layers=2, **SPECIAL),
    ),
    "jamba": (
        "jamba",
        "JambaForCausalLM",
        {
            **LM,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    "bamba": (
        "bamba",
        "BambaForCausalLM",
        {
            **LM,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
    ),
    "lfm2": (
        "lfm2",
        "Lfm2ForCausalLM",
        {**LM, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "qwen3_next": (
        "qwen3_next",
        "Qwen3NextForCausalLM",
        {
            **LM_HEAD_DIM,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "recurrent_gemma": (
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            lru_width=32,
            attention_window_size=16,
            block_types=["recurrent", "recurrent", "attention"],
            **SPECIAL,
        ),
    ),
    "rwkv": (
        "rwkv",
        "RwkvForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=32,
            attention_hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            context_length=64,
            **SPECIAL,
        ),
    ),
}


for _table, _modality in ((_MOE, "moe-lm"), (_SSM, "ssm-hybrid")):
    for _name, _spec in _table.items():
        causal(_name, *_spec, _modality)
