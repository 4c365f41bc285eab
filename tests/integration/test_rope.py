"""Rotary frequencies that change with the length: from the positions of a call alone, whatever was called before."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
)
from transformers.cache_utils import DynamicCache

from polyport import ExportedModel, Session
from polyport.testing.leftovers import Caller

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: The longest text with the original frequencies.
SWITCH = 16
LENGTHS = (4, 30, SWITCH - 1, SWITCH, SWITCH + 1, 40, 3, 20)
GREEDY: dict[str, Any] = {
    "max_new_tokens": 8,
    "min_new_tokens": 8,
    "do_sample": False,
    "output_logits": True,
    "return_dict_in_generate": True,
}


def _rope(kind: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope["short_factor"], rope["long_factor"] = [1.0, 1.1, 1.2, 1.3], [1.5, 2.0, 3.0, 4.0]
        rope["original_max_position_embeddings"] = SWITCH
    return rope


def _llama(kind: str) -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=SWITCH, rope_parameters=_rope(kind)))


def _gemma(kind: str) -> Any:
    """Frequencies by kind of layer."""
    ropes = {
        "full_attention": _rope(kind),
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    config = Gemma3TextConfig(
        **SIZES,
        head_dim=8,
        sliding_window=64,
        max_position_embeddings=SWITCH,
        layer_types=["full_attention", "sliding_attention"],
        rope_parameters=ropes,
    )
    return Gemma3ForCausalLM(config)


def _phi3() -> Any:
    """Computes its cache anew where the frequencies change."""
    sizes = {"max_position_embeddings": 64, "original_max_position_embeddings": SWITCH}
    return Phi3ForCausalLM(Phi3Config(**SIZES, **sizes, rope_parameters=_rope("longrope")))


def _phimoe() -> Any:
    """The scale changes, not the frequencies."""
    rope = {**_rope("longrope"), "short_mscale": 1.2, "long_mscale": 1.7}
    return PhimoeForCausalLM(
        PhimoeConfig(**SIZES, max_position_embeddings=64, num_local_experts=2, rope_parameters=rope)
    )


MODELS: dict[str, Callable[[], Any]] = {
    "llama-longrope": lambda: _llama("longrope"),
    "llama-dynamic": lambda: _llama("dynamic"),
    "gemma-longrope": lambda: _gemma("longrope"),
    "gemma-dynamic": lambda: _gemma("dynamic"),
    "phi3": _phi3,
    "phimoe": _phimoe,
}


def _fresh(name: str) -> Any:
    """The model, never called before: a dynamic one remembers the longest text."""
    torch.manual_seed(0)
    return MODELS[name]().eval()


def _exporter(export_format: str) -> Any:
    return Session(export_format).exporter()()


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(sum(shape)))


def _padded(rows: int, length: int) -> dict[str, torch.Tensor]:
    """All rows but the last are padded on the left."""
    ids, mask = _ids(rows, length), torch.ones(rows, length, dtype=torch.int64)
    for row in range(rows - 1):
        ids[row, : row + 1], mask[row, : row + 1] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Texts longer than the original length, which transformers warns of, are the point here."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def _assert_close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("export_format", ["dynamo", "onnx", "openvino"])
@pytest.mark.parametrize("name", MODELS)
def test_calls_in_any_order(name: str, export_format: str) -> None:
    model = _fresh(name)
    sample = {"input_ids": _ids(2, 5), "attention_mask": torch.ones(2, 5, dtype=torch.int64)}
    before = Caller(model, sample)
    exported = _exporter(export_format).export(model, sample, {"dynamic": True})
    assert before.changes() == []

    calls = [_padded(rows, length) for length in LENGTHS for rows in (1, 3)]
    with torch.no_grad():
        wanted = [_fresh(name)(**call).logits for call in calls]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda call: exported(**call), calls))
    for found in (
        [exported(**call) for call in calls],
        [exported(**call) for call in reversed(calls)][::-1],
        together,
    ):
        for call, ours, theirs in zip(calls, found, wanted, strict=True):
            kept = call["attention_mask"].bool()
            _assert_close(ours["logits"][kept], theirs[kept])


@pytest.mark.parametrize("name", ["llama-longrope", "llama-dynamic"])
@pytest.mark.parametrize("earlier", [(30,), (30, 4)])
def test_what_the_model_was_called_with_before_is_not_in_the_export(
    name: str, earlier: tuple[int, ...]
) -> None:
    model = _fresh(name)
    with torch.no_grad():
        for length in earlier:
            model(input_ids=_ids(1, length))
    sample = {"input_ids": _ids(1, 5)}
    before = Caller(model, sample)
    exported = _exporter("dynamo").export(model, sample, {"dynamic": True})
    assert before.changes() == []
    for length in LENGTHS:
        with torch.no_grad():
            wanted = _fresh(name)(input_ids=_ids(1, length)).logits
        _assert_close(exported(input_ids=_ids(1, length))["logits"], wanted)


@pytest.mark.parametrize("name", ["llama-longrope", "llama-dynamic"])
def test_a_model_cast_with_its_buffers(name: str) -> None:
    exported = _exporter("dynamo").export(
        _fresh(name).to(torch.bfloat16), {"input_ids": _ids(1, 5)}, {"dynamic": True}
    )
    for length in LENGTHS:
        with torch.no_grad():
            wanted = _fresh(name).to(torch.bfloat16)(input_ids=_ids(1, length)).logits
        torch.testing.assert_close(exported(input_ids=_ids(1, length))["logits"], wanted)


@pytest.fixture(
    scope="module",
    params=[(name, made) for name in MODELS for made in ("dynamo", "onnx", "openvino")],
    ids="-".join,
)
def generating(request: pytest.FixtureRequest) -> tuple[str, ExportedModel]:
    name, export_format = request.param
    exported = _exporter(export_format).export_for_generation(
        _fresh(name), {"input_ids": _ids(1, 5)}, {"dynamic": True}, multi_token_decode=True
    )
    return name, exported


@pytest.mark.parametrize("length", [3, SWITCH - 4, SWITCH - 1, SWITCH, SWITCH + 1, 30])
def test_generation(generating: tuple[str, ExportedModel], length: int) -> None:
    name, exported = generating
    for rows in (1, 3):
        prompt = _padded(rows, length)
        wanted = _fresh(name).generate(**prompt, **GREEDY)
        found = exported.generate(**prompt, **GREEDY)
        assert found.sequences.tolist() == wanted.sequences.tolist()
        _assert_close(found.logits, wanted.logits)


def test_steps_of_several_tokens(generating: tuple[str, ExportedModel]) -> None:
    name, exported = generating
    model, running, text = _fresh(name), exported.as_transformers(), _ids(3, 24)
    ours = DynamicCache(config=model.config)
    theirs = copy.deepcopy(ours)
    for start, end in [(0, 5), (5, 9), (9, 10), (10, 16), (16, 17), (17, 24)]:
        positions = torch.arange(start, end).expand(3, -1)
        call = {"input_ids": text[:, start:end], "position_ids": positions, "use_cache": True}
        with torch.no_grad():
            wanted = model(**call, cache=theirs).logits
        _assert_close(running(**call, cache=ours).logits, wanted)


def test_other_frequencies_are_left_to_the_model() -> None:
    plain = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=SWITCH)).eval()
    fix = "transformers-rope-state"
    for model, needed in ((plain, False), (_fresh("llama-longrope"), True), (_fresh("gemma-dynamic"), True)):
        exported: Any = _exporter("dynamo").export(model, {"input_ids": _ids(1, 5)}, {"dynamic": True})
        (component,) = exported.components.values()
        assert (fix in component.metadata.patches) is needed
