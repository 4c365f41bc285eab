"""Caches that an export returns are the model's own: eager goes on with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

import polyport
from polyport import DynamoConfig, ExecutorchConfig, ExportedModel, OnnxConfig, OpenVINOConfig

CONFIGS = {
    "dynamo": DynamoConfig, "onnx": OnnxConfig, "openvino": OpenVINOConfig, "executorch": ExecutorchConfig,
}  # fmt: skip

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**_SIZES))


def _sliding() -> Any:
    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**_SIZES, head_dim=8, sliding_window=8, layer_types=layers))


@pytest.fixture(scope="module", params=[_llama, _sliding], ids=["full", "sliding"])
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, dict[str, ExportedModel]]:
    torch.manual_seed(0)
    model = request.param().eval()
    sample = {"input_ids": torch.randint(1, 64, (1, 5))}
    loaded = {}
    configs = [config(dynamic=True) for config in CONFIGS.values()]
    for name, export in polyport.export(model, sample, configs).items():
        folder: Path = tmp_path_factory.mktemp(name) / "export"
        export.save_pretrained(folder)
        loaded[name] = ExportedModel.from_pretrained(folder)
    return model, loaded


@pytest.mark.parametrize("export_format", CONFIGS)
@pytest.mark.parametrize(("batch", "length"), [(1, 3), (2, 5), (3, 13)])
def test_eager_goes_on_with_the_exports_cache(
    exported: tuple[Any, dict[str, ExportedModel]], export_format: str, batch: int, length: int
) -> None:
    model, exports = exported
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, 64, (batch, length), generator=generator)
    step = torch.randint(1, 64, (batch, 1), generator=generator)
    with torch.no_grad():
        wanted, found = model(input_ids=ids), exports[export_format](input_ids=ids)
        assert type(found.cache) is type(wanted.cache)
        assert found.cache.get_seq_length() == wanted.cache.get_seq_length() == length
        for ours, theirs in zip(found.cache.layers, wanted.cache.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(ours.values, theirs.values, atol=1e-5, rtol=1e-5)
        after = model(input_ids=step, cache=found.cache).logits
        expected = model(input_ids=step, cache=wanted.cache).logits
    torch.testing.assert_close(after, expected, atol=1e-5, rtol=1e-5)
