"""Taking a model's generation apart: which components it has, and with which arguments."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from polyport.errors import ExportError, InputError
from polyport.generation.decompose import decompose, decompose_for_generation

sys.path[:0] = [str(Path(__file__).parents[1])]

import zoo  # noqa: E402

#: Case -> its components without several tokens per decode step; the names are those that a config by component takes.
COMPONENTS = {
    "llama": ["prefill", "decode"],
    "mamba": ["prefill", "decode"],
    "t5": ["encoder", "prefill", "decode"],
    "whisper": ["encoder", "prefill", "decode"],
    "llava": [
        "image_encoder", "multi_modal_projector", "embed_tokens", "language_model", "lm_head", "decode",
    ],
    "blip_2": ["image_encoder", "qformer", "language_projection", "embed_tokens", "prefill", "decode"],
}  # fmt: skip

Snapshot = dict[str, Any]


def _snapshot(model: torch.nn.Module, inputs: Mapping[str, Any]) -> Snapshot:
    """Everything that taking a model apart could change."""
    return {
        "weights": {name: (id(p), p._version, p.clone()) for name, p in model.named_parameters()},
        "attributes": [
            {key: id(value) for key, value in vars(module).items() if not isinstance(value, dict | bool)}
            for module in model.modules()
        ],
        "tables": [
            {key: len(value) for key, value in vars(module).items() if isinstance(value, dict)}
            for module in model.modules()
        ],
        "training": [module.training for module in model.modules()],
        "config": copy.deepcopy(model.config.to_dict()),  # type: ignore[union-attr, operator]
        "attention": model.config._attn_implementation,  # type: ignore[union-attr]
        "generation": copy.deepcopy(model.generation_config.to_dict()),  # type: ignore[union-attr, operator]
        "inputs": {name: (id(x), x._version, x.clone()) for name, x in inputs.items()},
    }


def _assert_same(before: Snapshot, after: Snapshot) -> None:
    assert {key: _plain(value) for key, value in after.items()} == {
        key: _plain(value) for key, value in before.items()
    }


def _plain(value: Any) -> Any:
    """With lists in place of tensors, which say of themselves whether they are equal."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


# ── which components ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("case", COMPONENTS)
def test_components_and_what_they_are_called_with(case: str) -> None:
    model, _, sample = zoo.build(case)
    assert sample is not None
    before = _snapshot(model, sample)
    parts = decompose_for_generation(model, sample)
    assert list(parts) == COMPONENTS[case]
    _assert_same(before, _snapshot(model, sample))
    for name, (module, kwargs) in parts.items():
        assert any(module is own for own in model.modules()), name
        assert all(value is not None and value is not False for value in kwargs.values()), name
        with torch.no_grad():
            module(**kwargs)
    _, step = parts["decode"]
    ids = step.get("decoder_input_ids", step.get("input_ids"))
    assert ids.shape == (1, 1)


@pytest.mark.parametrize("case", ["llama", "mamba", "t5", "llava", "blip_2"])
def test_several_tokens_per_step(case: str) -> None:
    model, _, sample = zoo.build(case)
    assert sample is not None
    parts = decompose_for_generation(model, sample, multi_token_decode=True)
    # keys and values alone: the step on an empty cache is a prefill
    assert list(parts) == (["decode"] if case == "llama" else COMPONENTS[case])
    _, step = parts["decode"]
    ids = step.get("decoder_input_ids", step.get("input_ids"))
    assert ids.shape == (1, 2)


def test_one_token_per_step_is_pinned() -> None:
    model, _, sample = zoo.build("llama")
    assert sample is not None
    one, many = (decompose(model, sample, None, several) for several in (False, True))
    assert one.parts["decode"].pinned == {"sequence"}
    assert one.parts["prefill"].pinned == frozenset()
    assert many.parts["decode"].pinned == frozenset()
    model, _, sample = zoo.build("t5")
    assert sample is not None
    assert decompose(model, sample, None, False).parts["decode"].pinned == {"decoder_sequence"}


def test_the_steps_of_a_language_model(tiny_llama: Any, token_ids: Any) -> None:
    sample = token_ids(1, 5)
    parts = decompose_for_generation(tiny_llama, sample)
    prefill, decode = parts["prefill"][1], parts["decode"][1]
    assert prefill["input_ids"].tolist() == sample["input_ids"].tolist()
    # generate leaves a mask of ones out: the sample has one token masked, so that its shape is known
    assert prefill["attention_mask"].shape == (1, 5)
    assert prefill["logits_to_keep"].tolist() == [4]
    assert decode["attention_mask"].shape == (1, 6)
    assert decode["position_ids"].shape == (1, 1)
    assert isinstance(decode["cache"], DynamicCache)
    assert decode["cache"].get_seq_length() == 5
    assert prefill["cache"].get_seq_length() == 0


def test_caches_of_an_encoder_decoder() -> None:
    model, _, sample = zoo.build("t5")
    assert sample is not None
    parts = decompose_for_generation(model, sample)
    caches = [parts[name][1]["cache"] for name in ("prefill", "decode")]
    assert all(isinstance(cache, EncoderDecoderCache) for cache in caches)
    assert [cache.get_seq_length() for cache in caches] == [0, 1]


def test_static_cache(tiny_llama: Any, token_ids: Any) -> None:
    config = GenerationConfig(cache_implementation="static", max_cache_len=24)
    sample = token_ids(1, 5)
    before = _snapshot(tiny_llama, sample)
    found = decompose(tiny_llama, sample, config, False)
    _assert_same(before, _snapshot(tiny_llama, sample))
    assert found.static
    assert not decompose(tiny_llama, sample, None, False).static
    for part in found.parts.values():
        cache = part.kwargs["cache"]
        assert isinstance(cache, StaticCache)
        assert [layer.keys.shape[2] for layer in cache.layers] == [24, 24]
    prefill = found.parts["prefill"].kwargs["cache"]
    assert all(not layer.keys.any() for layer in prefill.layers)
    assert config.to_dict() == GenerationConfig(cache_implementation="static", max_cache_len=24).to_dict()


def test_the_models_own_settings_are_overruled(token_ids: Any) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.update(
        num_beams=3, do_sample=True, max_length=2, use_cache=False, eos_token_id=list(range(1, 64))
    )
    parts = decompose_for_generation(model, token_ids(1, 5))
    assert parts["decode"][1]["input_ids"].shape == (1, 1)


def test_a_model_in_training_stays_so(token_ids: Any) -> None:
    model, _, sample = zoo.build("llama")
    assert sample is not None
    model.train()
    before = _snapshot(model, sample)
    decompose_for_generation(model, sample)
    _assert_same(before, _snapshot(model, sample))
    assert model.training


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_errors_leave_everything_as_it_was(tiny_llama: Any, token_ids: Any) -> None:
    sample = {**token_ids(1, 5), "pixel_values": torch.zeros(1, 3)}
    before = _snapshot(tiny_llama, sample)
    with pytest.raises(
        InputError, match=r"LlamaForCausalLM itself fails to generate from these inputs.*pixel_values"
    ):
        decompose_for_generation(tiny_llama, sample)
    _assert_same(before, _snapshot(tiny_llama, sample))
    hooks = [module._forward_hooks or module._forward_pre_hooks for module in tiny_llama.modules()]
    assert not any(hooks)


def test_interrupts_leave_everything_as_it_was(
    tiny_llama: Any, token_ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = token_ids(1, 5)
    calls = []

    def interrupted(*_: Any) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt

    handle = tiny_llama.lm_head.register_forward_hook(interrupted)
    try:
        before = _snapshot(tiny_llama, sample)
        with pytest.raises(KeyboardInterrupt):
            decompose_for_generation(tiny_llama, sample)
        _assert_same(before, _snapshot(tiny_llama, sample))
    finally:
        handle.remove()


class _Bypassing(PreTrainedModel):
    """Generates on its own: an encoder once, and then no module per token."""

    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.encoder = torch.nn.Linear(4, 4)
        self.generation_config = GenerationConfig()
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids

    def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        self.encoder(torch.ones(1, 4))
        return torch.cat([input_ids, input_ids[:, -1:]], dim=1)


def test_a_generate_that_bypasses_forward(token_ids: Any) -> None:
    model = _Bypassing(PreTrainedConfig()).eval()
    with pytest.raises(
        ExportError, match=r"_Bypassing.generate made 3 tokens without calling.*encoder x1.*export\(\)"
    ):
        decompose_for_generation(model, {"input_ids": token_ids(1, 5)["input_ids"]})


def test_a_model_that_does_not_generate(tiny_bert: Any, token_ids: Any) -> None:
    with pytest.raises(ExportError, match=r"BertModel does not generate; export it with export\(\)"):
        decompose_for_generation(tiny_bert, token_ids(1, 5))


def test_not_a_model() -> None:
    with pytest.raises(ExportError, match="does not generate"):
        decompose_for_generation(torch.nn.Linear(2, 2), {})


def test_a_model_that_takes_one_token_at_a_time() -> None:
    """Steps of several tokens on a filled cache are tried, and refused where something else comes out."""
    model, _, sample = zoo.build("llama")
    assert sample is not None
    forward = model.forward

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        if kwargs.get("cache") is not None and kwargs["input_ids"].shape[1] == 2:
            outputs.logits = outputs.logits + 1
        return outputs

    forgetful.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    model.forward = forgetful
    decompose_for_generation(model, sample)
    with pytest.raises(ExportError, match=r"two tokens at once.*the logits differ.*multi_token_decode=False"):
        decompose_for_generation(model, sample, multi_token_decode=True)
