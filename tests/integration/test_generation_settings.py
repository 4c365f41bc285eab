"""What an export for generation makes of configs, of odd samples, and of models that generate in their own way."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from polyport import DynamoExporter, ExportedModel, OnnxExporter, OpenVINOExporter
from polyport.errors import ConfigError, ExportError, InputError

sys.path.insert(0, str(Path(__file__).parents[1]))

import zoo

EXPORTERS = {"dynamo": DynamoExporter, "onnx": OnnxExporter, "openvino": OpenVINOExporter}

formats = pytest.mark.parametrize("export_format", EXPORTERS)


PROMPT = {"input_ids": torch.tensor([[5, 6, 7, 8]])}


def _static(length: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(cache_implementation="static", max_cache_len=length)


def test_what_the_config_leaves_out_is_the_models(tiny_llama: Any) -> None:
    exported = DynamoExporter().export_for_generation(
        tiny_llama, PROMPT, None, _static(32), multi_token_decode=True
    )
    assert exported.generation_config is not None
    assert exported.generation_config.eos_token_id == tiny_llama.generation_config.eos_token_id == 2
    assert exported.generation_config.max_cache_len == 32
    assert exported.generation_config.max_new_tokens is None
    assert tiny_llama.generation_config.cache_implementation is None


def test_sizes_are_open_unless_told_otherwise(tiny_llama: Any) -> None:
    exported = DynamoExporter().export_for_generation(tiny_llama, PROMPT)
    wanted = tiny_llama.generate(**PROMPT, max_new_tokens=6, do_sample=False)
    assert torch.equal(exported.generate(**PROMPT, max_new_tokens=6, do_sample=False), wanted)


@formats
def test_fixed_sizes_need_a_static_cache(tiny_llama: Any, export_format: str) -> None:
    exporter = EXPORTERS[export_format]()
    with pytest.raises(ConfigError, match="grows with every token"):
        exporter.export_for_generation(tiny_llama, PROMPT, {"dynamic": False})
    exported = exporter.export_for_generation(tiny_llama, PROMPT, {"dynamic": False}, _static(12))
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(exported.generate(**PROMPT, **options), tiny_llama.generate(**PROMPT, **options))
    two = {"input_ids": PROMPT["input_ids"].repeat(2, 1)}
    with pytest.raises(InputError, match="Axis 0 of 'input_ids' has size 2, which must be 1"):
        exported.generate(**two, **options)


@formats
@pytest.mark.parametrize("room", [7, 12])
def test_a_small_static_cache_opens_as_much_as_a_large_one(
    tiny_llama: Any, export_format: str, room: int
) -> None:
    exported = EXPORTERS[export_format]().export_for_generation(
        tiny_llama, PROMPT, {"dynamic": True}, _static(room), multi_token_decode=True
    )
    assert {"batch", "sequence", "cache_length"} <= set(exported["decode"].metadata.axes)
    long = {"input_ids": torch.arange(3, 63).reshape(2, 30) % 60 + 4}
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(exported.generate(**long, **options), tiny_llama.generate(**long, **options))


def test_an_export_assists_an_export(tiny_llama: Any) -> None:
    exported = DynamoExporter().export_for_generation(tiny_llama, PROMPT, multi_token_decode=True)
    wanted = tiny_llama.generate(**PROMPT, max_new_tokens=8, do_sample=False)
    got = exported.generate(**PROMPT, max_new_tokens=8, do_sample=False, assistant_model=exported)
    assert torch.equal(got, wanted)


def test_one_graph_can_not_generate(tiny_llama: Any) -> None:
    exported = DynamoExporter().export(tiny_llama, PROMPT, {"dynamic": True})
    with pytest.raises(InputError, match="wasn't made with export_for_generation"):
        exported.generate(**PROMPT)


def test_a_prompt_over_a_caches_length(tiny_llama: Any) -> None:
    from transformers import StaticCache

    exported = DynamoExporter().export_for_generation(tiny_llama, PROMPT, None, _static(32))
    cache = StaticCache(config=tiny_llama.config, max_cache_len=6)
    long = torch.arange(4, 14)[None]
    with pytest.raises(InputError, match="room for 6 tokens: 0 are in it, and 10 more don't fit"):
        exported.as_transformers()(input_ids=long, cache=cache)


def test_a_component_that_is_not_there(tiny_llama: Any, tmp_path: Path) -> None:
    from polyport.errors import ArtifactError

    DynamoExporter().export_for_generation(tiny_llama, PROMPT).save_pretrained(tmp_path)
    manifest = json.loads((tmp_path / "export.json").read_text())
    del manifest["components"]["decode"]
    (tmp_path / "export.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="lacks the component 'decode', which its generation needs"):
        ExportedModel.from_pretrained(tmp_path).generate(**PROMPT)


@formats
def test_whisper_finds_out_the_language(export_format: str) -> None:
    """Its `generate` runs a step of its own before the prompt's, which is neither a prefill nor a decode step."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=1600,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        max_source_positions=20,
        max_target_positions=48,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(0)
    whisper = WhisperForConditionalGeneration(config).eval()
    own = whisper.generation_config
    own._from_model_config = False
    own.lang_to_id, own.task_to_id = {"<|en|>": 4, "<|de|>": 5}, {"transcribe": 6}
    own.is_multilingual, own.no_timestamps_token_id = True, 50
    sound = {"input_features": torch.randn(1, 8, 40, generator=torch.Generator().manual_seed(0))}
    exported = EXPORTERS[export_format]().export_for_generation(whisper, sound, {"dynamic": True})
    assert list(exported) == ["encoder", "prefill", "decode"]
    assert "input_features" not in exported["prefill"].metadata.input_names
    for options in ({}, {"language": "de"}):
        wanted = whisper.generate(**sound, max_new_tokens=6, **options)
        assert torch.equal(exported.generate(**sound, max_new_tokens=6, **options), wanted)


def test_one_config_per_component(tiny_llama: Any) -> None:
    exporter = DynamoExporter()
    both = {"prefill": {"dynamic": True}, "decode": {"dynamic": True}}
    assert list(exporter.export_for_generation(tiny_llama, PROMPT, both)) == ["prefill", "decode"]
    with pytest.raises(ConfigError, match="lacks decode and names encoder, which there isn't"):
        exporter.export_for_generation(
            tiny_llama, PROMPT, {"prefill": {"dynamic": True}, "encoder": {"dynamic": True}}
        )


def test_inputs_of_every_component_from_several_samples(tiny_llama: Any) -> None:
    from polyport.generation.decompose import component_inputs

    samples = [PROMPT, {"input_ids": torch.tensor([[9, 10, 11, 12, 13, 14]])}]
    found = component_inputs(tiny_llama, samples)
    assert list(found) == ["prefill", "decode"]
    assert [kwargs["input_ids"].shape[1] for kwargs in found["prefill"]] == [4, 6]
    assert [kwargs["cache"].get_seq_length() for kwargs in found["decode"]] == [4, 6]


@formats
@pytest.mark.parametrize("way", ["growing", "static"])
def test_a_cache_that_is_reset(tiny_llama: Any, export_format: str, way: str) -> None:
    """Two texts on one cache object, with a reset in between."""
    from transformers import DynamicCache, StaticCache

    exported = EXPORTERS[export_format]().export_for_generation(
        tiny_llama, PROMPT, None, _static(16) if way == "static" else None
    )
    running = exported.as_transformers()
    cache = StaticCache(config=tiny_llama.config, max_cache_len=16) if way == "static" else DynamicCache()
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": None}
    for ids in (torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[11, 12, 13]])):
        wanted = tiny_llama.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
        assert torch.equal(running.generate(input_ids=ids, cache=cache, **options), wanted)
        cache.reset()


@formats
def test_a_step_that_is_right_for_many_tokens_only(export_format: str) -> None:
    """Speech2Text makes its table of positions as long as the new tokens, whatever is cached; one token at a time is right."""
    model, _, sound = zoo.build("speech_to_text")
    assert sound is not None
    exporter = EXPORTERS[export_format]()
    with pytest.raises(ExportError, match="so a graph for several tokens can't take one"):
        exporter.export_for_generation(model, sound, multi_token_decode=True)
    options: dict[str, Any] = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    exported = exporter.export_for_generation(model, sound)
    assert torch.equal(exported.generate(**sound, **options), model.generate(**sound, **options))
