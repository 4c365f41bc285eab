"""Text encoders: BERT and its kin."""

# ruff: noqa: C408 - as calls of dict, the formatter keeps several options on one line

from __future__ import annotations

import torch

from .cases import BOS, EOS, PAD, VOCAB, Built, Inputs, Options, case, config, make, padded

ENCODER: Options = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=64,
    type_vocab_size=2,
    pad_token_id=PAD,
    bos_token_id=BOS,
    eos_token_id=EOS,
)
_ROB = {**ENCODER, "type_vocab_size": 1}
_TASK: dict[str, tuple[str, Options]] = {
    "ForSequenceClassification": ("sequence-classification", {"num_labels": 3}),
    "ForTokenClassification": ("token-classification", {"num_labels": 5}),
    "ForQuestionAnswering": ("question-answering", {}),
    "ForMaskedLM": ("masked-lm", {}),
    "ForMultipleChoice": ("multiple-choice", {}),
}

# name: (model_type, class prefix, head, config)
_ENCODERS: dict[str, tuple[str, str, str, Options]] = {
    "bert": ("bert", "Bert", "ForSequenceClassification", ENCODER),
    "bert_mlm": ("bert", "Bert", "ForMaskedLM", ENCODER),
    "roberta": ("roberta", "Roberta", "ForTokenClassification", _ROB),
    "distilbert": (
        "distilbert",
        "DistilBert",
        "ForQuestionAnswering",
        dict(vocab_size=VOCAB, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=64),
    ),
    "electra": ("electra", "Electra", "ForTokenClassification", {**ENCODER, "embedding_size": 16}),
    "albert": ("albert", "Albert", "ForMaskedLM", {**ENCODER, "embedding_size": 16}),
    "mpnet": ("mpnet", "MPNet", "ForMaskedLM", ENCODER),
    "deberta": (
        "deberta",
        "Deberta",
        "ForSequenceClassification",
        {
            **ENCODER,
            "relative_attention": True,
            "max_relative_positions": 16,
            "pos_att_type": ["c2p", "p2c"],
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
    ),
    "deberta_v2": (
        "deberta-v2",
        "DebertaV2",
        "ForSequenceClassification",
        {
            **ENCODER,
            "relative_attention": True,
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
    ),
    "modernbert": (
        "modernbert",
        "ModernBert",
        "ForMaskedLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=128,
            local_attention=8,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            cls_token_id=BOS,
            sep_token_id=EOS,
        ),
    ),
    "xlm_roberta": ("xlm-roberta", "XLMRoberta", "ForSequenceClassification", _ROB),
    "camembert": ("camembert", "Camembert", "ForTokenClassification", _ROB),
    "fnet": ("fnet", "FNet", "ForMaskedLM", {k: v for k, v in ENCODER.items() if k != "num_attention_heads"}),
    "squeezebert": (
        "squeezebert",
        "SqueezeBert",
        "ForSequenceClassification",
        {**ENCODER, "embedding_size": 32},
    ),
    "eurobert": (
        "eurobert",
        "EuroBert",
        "ForSequenceClassification",
        {**{k: v for k, v in ENCODER.items() if k != "type_vocab_size"}, "num_key_value_heads": 2},
    ),
}


def _encoder(name: str, model_type: str, prefix: str, head: str, kw: Options) -> None:
    task, extra = _TASK[head]

    @case(name, task, "text-encoder")
    def builder() -> Built:
        model = make(prefix + head, config(model_type, **kw, **extra))

        def inputs(batch: int, seq: int) -> Inputs:
            out = padded(batch, seq)
            if kw.get("type_vocab_size") == 2 and model_type != "mpnet":
                types = torch.zeros(batch, seq, dtype=torch.long)
                types[:, seq // 2 :] = 1
                out["token_type_ids"] = types
            if model_type == "fnet":
                out.pop("attention_mask")
            return out

        return Built(model, inputs)


for _name, _spec in _ENCODERS.items():
    _encoder(_name, *_spec)


@case("bert_multiple_choice", "multiple-choice", "text-encoder")
def bert_multiple_choice() -> Built:
    model = make("BertForMultipleChoice", config("bert", **ENCODER))

    def inputs(batch: int, seq: int) -> Inputs:
        flat = padded(2 * batch, seq + 4)
        return {k: v.reshape(batch, 2, seq + 4) for k, v in flat.items()}

    return Built(model, inputs, alt=(3, 17))
