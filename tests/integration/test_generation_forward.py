"""Step by step: logits and caches of an export against eager's, where windows and frequencies change on the way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)
from transformers.cache_utils import DynamicCache

from polyport import DynamoExporter, ExportedModel, OnnxExporter, OpenVINOExporter
from polyport.generation.states import keep_all_tokens

EXPORTERS = {"dynamo": DynamoExporter, "onnx": OnnxExporter, "openvino": OpenVINOExporter}

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: How far logits and keys may be apart: one float32 sum in another order, through two layers.
ATOL = RTOL = 1e-4


def _llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def _mistral() -> Any:
    """A window of 4 tokens: the sample fills it, and everything else goes past it."""
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4))


def _gemma() -> Any:
    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=4, layer_types=layers))


def _phi() -> Any:
    """Other frequencies from 17 tokens on."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 16,
    }
    return Phi3ForCausalLM(
        Phi3Config(
            **SIZES,
            max_position_embeddings=64,
            original_max_position_embeddings=16,
            rope_parameters=rope,
        )
    )


MODELS: dict[str, Callable[[], Any]] = {"full": _llama, "window": _mistral, "mixed": _gemma, "longrope": _phi}


@attrs.frozen
class Made:
    """A model, and its exports by whether their decode step takes any number of tokens."""

    name: str
    model: Any
    exports: dict[bool, ExportedModel]


def _pairs() -> Iterator[Any]:
    for export_format in EXPORTERS:
        for name in MODELS:
            marks = [pytest.mark.xdist_group(f"generation forward {export_format}")]
            yield pytest.param((export_format, name), id=f"{export_format}-{name}", marks=marks)


@pytest.fixture(scope="session", params=_pairs())
def made(request: pytest.FixtureRequest) -> Made:
    export_format, name = request.param
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    sample = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]])}
    exports = {
        many: EXPORTERS[export_format]().export_for_generation(
            model, sample, {"dynamic": True}, multi_token_decode=many
        )
        for many in ((False, True) if name == "full" else (False,))
    }
    return Made(name, model, exports)


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(sum(shape)))


def _assert_close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got.logits, expected.logits, atol=ATOL, rtol=RTOL)
    for ours, theirs in zip(got.cache.layers, expected.cache.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=ATOL, rtol=RTOL)
        torch.testing.assert_close(ours.values, theirs.values, atol=ATOL, rtol=RTOL)


def _call(model: Any, ids: torch.Tensor, cache: Any, mask: torch.Tensor | None = None) -> Any:
    past = cache.get_seq_length()
    positions = torch.arange(past, past + ids.shape[1]).expand(ids.shape[0], -1)
    if mask is not None:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        return model(input_ids=ids, position_ids=positions, attention_mask=mask, cache=cache, use_cache=True)


def _caches(model: Any) -> tuple[DynamicCache, DynamicCache]:
    """One for the export and one for eager; both keep all tokens."""
    cache = DynamicCache(config=model.config)
    keep_all_tokens(cache)
    return cache, copy.deepcopy(cache)


@pytest.mark.parametrize(("batch", "prompt"), [(1, 3), (2, 6), (2, 13)])
def test_a_prefill_and_eight_steps(made: Made, batch: int, prompt: int) -> None:
    text = _ids(batch, prompt + 8)
    for exported in made.exports.values():
        ours, theirs = _caches(made.model)
        running = exported.as_transformers()
        for start, end in [(0, prompt), *((n, n + 1) for n in range(prompt, prompt + 8))]:
            expected = _call(made.model, text[:, start:end], theirs)
            got = _call(running, text[:, start:end], ours)
            assert got.cache is ours
            assert ours.get_seq_length() == theirs.get_seq_length() == end
            _assert_close(got, expected)


def test_several_tokens_on_a_filled_cache(made: Made) -> None:
    text = _ids(2, 14)
    for exported in made.exports.values():
        ours, theirs = _caches(made.model)
        for start, end in [(0, 5), (5, 9), (9, 10), (10, 14)]:
            expected = _call(made.model, text[:, start:end], theirs)
            _assert_close(_call(exported.as_transformers(), text[:, start:end], ours), expected)


def test_a_padded_batch_step_by_step(made: Made) -> None:
    text, mask = _ids(2, 12), torch.ones(2, 12, dtype=torch.int64)
    text[0, :3], mask[0, :3] = 0, 0
    for exported in made.exports.values():
        ours, theirs = _caches(made.model)
        for start, end in [(0, 8), (8, 9), (9, 10), (10, 11), (11, 12)]:
            expected = _call(made.model, text[:, start:end], theirs, mask[:, :end])
            got = _call(exported.as_transformers(), text[:, start:end], ours, mask[:, :end])
            # what a padding token itself computes is nobody's business
            kept = mask[:, start:end].bool()
            torch.testing.assert_close(got.logits[kept], expected.logits[kept], atol=ATOL, rtol=RTOL)


def test_eager_and_the_export_take_turns(made: Made) -> None:
    """A cache of either is a cache for the other."""
    text = _ids(1, 12)
    running = made.exports[False].as_transformers()
    ours, theirs = _caches(made.model)
    for index, (start, end) in enumerate([(0, 6), *((n, n + 1) for n in range(6, 12))]):
        expected = _call(made.model, text[:, start:end], theirs)
        turn = made.model if index % 2 else running
        _assert_close(_call(turn, text[:, start:end], ours), expected)


def test_a_call_without_positions(made: Made) -> None:
    text = _ids(2, 9)
    ours, theirs = _caches(made.model)
    running = made.exports[False].as_transformers()
    for start, end in [(0, 6), (6, 7), (7, 9)]:
        with torch.no_grad():
            expected = made.model(input_ids=text[:, start:end], cache=theirs)
        _assert_close(running(input_ids=text[:, start:end], cache=ours), expected)


@pytest.mark.parametrize("length", [3, 11, 30])
def test_generating_past_windows_and_switches(made: Made, length: int) -> None:
    """The model itself, with a cache that forgets: what lies outside of a window counts for nothing."""
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    for exported in made.exports.values():
        for more in ({}, {"num_beams": 3}):
            expected = made.model.generate(_ids(1, length), **options, **more)
            assert exported.generate(_ids(1, length), **options, **more).tolist() == expected.tolist()


def test_going_on_with_a_cache_that_forgot(made: Made) -> None:
    """Eager's own cache, filled beyond the window."""
    prompt = _ids(1, 9)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    more = torch.cat([prompt, _ids(1, 2)], dim=1)
    results = []
    for generating in (made.model, *made.exports.values()):
        cache = DynamicCache(config=made.model.config)
        with torch.no_grad():
            made.model(input_ids=prompt, cache=cache)
        results.append(generating.generate(more, cache=cache, **options).tolist())
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("gap", [3, 9])
def test_the_amount_of_padding_changes_nothing(made: Made, gap: int) -> None:
    if made.name == "longrope":
        gap = min(gap, 3)  # the model itself switches by the length with the padding
    ids = _ids(1, 5)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    padded = torch.nn.functional.pad(ids, (gap, 0))
    mask = (padded != 0).long()
    for exported in made.exports.values():
        plain = exported.generate(ids, **options)
        got = exported.generate(padded, attention_mask=mask, **options)
        assert got[:, gap:].tolist() == plain.tolist()
        assert plain.tolist() == made.model.generate(ids, **options).tolist()


def test_what_else_is_in_the_batch_changes_nothing(made: Made) -> None:
    rows = [_ids(1, length) for length in (4, 9, 6)]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    batch = torch.cat([torch.nn.functional.pad(row, (9 - row.shape[1], 0)) for row in rows])
    for exported in made.exports.values():
        together = exported.generate(batch, attention_mask=(batch != 0).long(), **options)
        for row, got in zip(rows, together, strict=True):
            alone = exported.generate(row, **options)
            assert got[9 - row.shape[1] :].tolist() == alone[0].tolist()
