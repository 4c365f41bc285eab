"""Decoder-only language models: dense ones."""

# ruff: noqa: C408 - as calls of dict, the formatter keeps several options on one line

from __future__ import annotations

from .cases import BOS, EOS, PAD, VOCAB, Built, Inputs, Options, case, config, ids, make, padded, prompt

SPECIAL: Options = dict(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
LM: Options = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    **SPECIAL,
)
LM_HEAD_DIM: Options = {**LM, "head_dim": 8}
_MHA = {k: v for k, v in LM.items() if k != "num_key_value_heads"}
SLIDING = ["sliding_attention", "full_attention"]

LLAMA_TEXT: Options = dict(model_type="llama", **LM)
QWEN_TEXT: Options = dict(model_type="qwen2", **LM)

_DECODERS: dict[str, tuple[str, str, Options]] = {
    "gpt2": (
        "gpt2",
        "GPT2LMHeadModel",
        dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, **SPECIAL),
    ),
    "gpt_neo": (
        "gpt_neo",
        "GPTNeoForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            max_position_embeddings=128,
            attention_types=[[["global", "local"], 1]],
            window_size=8,
            **SPECIAL,
        ),
    ),
    "llama": ("llama", "LlamaForCausalLM", LM),
    "llama_seqcls": ("llama", "LlamaForSequenceClassification", {**LM, "num_labels": 3}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", LM),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", LM_HEAD_DIM),
    "mistral": ("mistral", "MistralForCausalLM", {**LM_HEAD_DIM, "sliding_window": 8}),
    "gemma": ("gemma", "GemmaForCausalLM", LM_HEAD_DIM),
    "gemma2": (
        "gemma2",
        "Gemma2ForCausalLM",
        {**LM_HEAD_DIM, "sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": SLIDING},
    ),
    "gemma3_text": (
        "gemma3_text",
        "Gemma3ForCausalLM",
        {**LM_HEAD_DIM, "sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": SLIDING},
    ),
    "phi": ("phi", "PhiForCausalLM", {**LM, "partial_rotary_factor": 0.5}),
    "phi3": ("phi3", "Phi3ForCausalLM", {**LM, "sliding_window": None}),
    "gpt_neox": ("gpt_neox", "GPTNeoXForCausalLM", _MHA),
    "opt": (
        "opt",
        "OPTForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=64,
            max_position_embeddings=128,
            word_embed_proj_dim=32,
            **SPECIAL,
        ),
    ),
    "bloom": (
        "bloom",
        "BloomForCausalLM",
        dict(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, **SPECIAL),
    ),
    "falcon": (
        "falcon",
        "FalconForCausalLM",
        dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **SPECIAL),
    ),
    "olmo": ("olmo", "OlmoForCausalLM", LM),
    "olmo2": ("olmo2", "Olmo2ForCausalLM", LM),
    "granite": (
        "granite",
        "GraniteForCausalLM",
        {
            **LM,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "attention_multiplier": 0.25,
        },
    ),
    "cohere": ("cohere", "CohereForCausalLM", LM),
    "cohere2": ("cohere2", "Cohere2ForCausalLM", {**LM, "sliding_window": 8, "layer_types": SLIDING}),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM", {**LM, "no_rope_layers": [1, 0]}),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM", {**LM, "sliding_window": None}),
    "stablelm": ("stablelm", "StableLmForCausalLM", {**LM, "partial_rotary_factor": 0.5}),
    "glm": ("glm", "GlmForCausalLM", {**LM_HEAD_DIM, "partial_rotary_factor": 0.5}),
    "modernbert_decoder": (
        "modernbert-decoder",
        "ModernBertDecoderForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            local_attention=16,
            layer_types=SLIDING,
            cls_token_id=BOS,
            sep_token_id=EOS,
            **SPECIAL,
        ),
    ),
}


def causal(name: str, model_type: str, cls: str, kw: Options, modality: str) -> None:
    """Register a language model with text inputs."""
    task = "sequence-classification" if cls.endswith("SequenceClassification") else "causal-lm"

    @case(name, task, modality)
    def builder() -> Built:
        model = make(cls, config(model_type, **kw))

        def inputs(batch: int, seq: int) -> Inputs:
            out = padded(batch, seq)
            if model_type == "rwkv":  # takes no padding mask
                out = {"input_ids": ids(batch, seq)}
            return out

        return Built(model, inputs, prompt() if task == "causal-lm" else None)


for _name, _spec in _DECODERS.items():
    causal(_name, *_spec, "decoder-lm")
