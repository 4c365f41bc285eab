"""Everything that `generate` takes, on exports of a language model: the same tokens as eager."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor

from polyport import DynamoExporter, ExportedModel, OnnxExporter, OpenVINOExporter

EXPORTERS = {"dynamo": DynamoExporter, "onnx": OnnxExporter, "openvino": OpenVINOExporter}

#: Way to export -> options of `export_for_generation`.
WAYS = {"one token": (False, False), "many tokens": (True, False), "static": (True, True)}

#: Room of the static caches.
ROOM = 64

Ids = torch.Tensor


def _llama(layers: int) -> Any:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        pad_token_id=0,
    )
    torch.manual_seed(layers)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def model() -> Any:
    return _llama(2)


@attrs.frozen
class Made:
    """An export, loaded from where it was saved."""

    exported: ExportedModel
    folder: Path
    format: str
    way: str

    @property
    def static(self) -> bool:
        return self.way == "static"


def _pairs() -> Iterator[Any]:
    for pair in ((name, way) for name in EXPORTERS for way in WAYS):
        yield pytest.param(pair, id="-".join(pair), marks=pytest.mark.xdist_group(f"generation {pair[0]}"))


@pytest.fixture(scope="session", params=_pairs())
def made(request: pytest.FixtureRequest, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Made:
    name, way = request.param
    many, static = WAYS[way]
    config = copy.deepcopy(model.generation_config)
    if static:
        config.update(cache_implementation="static", max_cache_len=ROOM)
    sample = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]])}
    exported = EXPORTERS[name]().export_for_generation(
        model, sample, {"dynamic": True}, config if static else None, many
    )
    assert list(exported) == (["decode"] if many else ["prefill", "decode"])
    folder = tmp_path_factory.mktemp("generation") / "export"
    exported.save_pretrained(folder)
    return Made(ExportedModel.from_pretrained(folder), folder, name, way)


@pytest.fixture
def exported(made: Made) -> ExportedModel:
    return made.exported


def _ids(*shape: int) -> Ids:
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(sum(shape)))


def _both(model: Any, exported: ExportedModel, *args: Any, new: int = 12, **kwargs: Any) -> tuple[Any, Any]:
    """What eager makes, and what the export makes."""
    kwargs = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, **kwargs}
    results = []
    for generating in (model, exported):
        torch.manual_seed(0)
        results.append(generating.generate(*args, **kwargs))
    return results[0], results[1]


def _same(model: Any, exported: ExportedModel, *args: Any, **kwargs: Any) -> Ids:
    expected, got = _both(model, exported, *args, **kwargs)
    assert got.tolist() == expected.tolist()
    return got


# ── searching and sampling ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("length", [1, 2, 5, 6, 40])
def test_greedy(model: Any, exported: ExportedModel, length: int) -> None:
    assert _same(model, exported, _ids(1, length)).shape == (1, length + 12)
    # far from one token again and again
    got = _same(model, exported, _ids(1, length), no_repeat_ngram_size=1)
    assert len(set(got[0, length:].tolist())) == 12


def test_beam_search(model: Any, exported: ExportedModel) -> None:
    _same(model, exported, _ids(2, 6), num_beams=4)


def test_several_results_per_prompt(model: Any, exported: ExportedModel) -> None:
    assert _same(model, exported, _ids(2, 6), num_beams=4, num_return_sequences=3).shape == (6, 18)
    got = _same(model, exported, _ids(2, 6), do_sample=True, num_return_sequences=3)
    assert len({tuple(row) for row in got.tolist()}) == 6


def test_sampling(model: Any, exported: ExportedModel) -> None:
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
    _same(model, exported, _ids(2, 6), **options)
    _same(model, exported, _ids(2, 6), num_beams=2, **options)


def test_a_batch_padded_on_the_left(model: Any, exported: ExportedModel) -> None:
    ids, mask = _ids(3, 9), torch.ones(3, 9, dtype=torch.int64)
    for row, gap in enumerate((0, 2, 7)):
        ids[row, :gap], mask[row, :gap] = 0, 0
    got = _same(model, exported, ids, attention_mask=mask)
    for row, gap in enumerate((0, 2, 7)):
        assert got[row, gap:].tolist() == _same(model, exported, ids[row : row + 1, gap:])[0].tolist()


def test_scores_and_logits(model: Any, exported: ExportedModel) -> None:
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, got = _both(model, exported, _ids(2, 6), **options)
    assert type(got) is type(expected)
    assert got.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.scores, expected.scores, atol=1e-4, rtol=1e-4)
    assert got.cache.get_seq_length() == expected.cache.get_seq_length() == 17


def test_without_a_cache(model: Any, made: Made) -> None:
    if not made.static:
        _same(model, made.exported, _ids(2, 6), use_cache=False)


# ── what looks over its shoulder ────────────────────────────────────────────────────────────────────────────────────


class Heard:
    """A streamer that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: Ids) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


def test_a_streamer_hears_the_same(model: Any, exported: ExportedModel) -> None:
    ours, theirs = Heard(), Heard()
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    model.generate(_ids(1, 6), streamer=theirs, **options)
    exported.generate(_ids(1, 6), streamer=ours, **options)
    assert ours.heard == theirs.heard
    assert len(ours.heard) == 8


def test_stopping_criteria(model: Any, exported: ExportedModel) -> None:
    def long_enough(ids: Ids, scores: Any, **_: Any) -> Ids:
        return torch.full((ids.shape[0],), ids.shape[1] >= 10)

    assert _same(model, exported, _ids(2, 6), stopping_criteria=[long_enough]).shape == (2, 10)


class OnlyOdd(LogitsProcessor):
    def __call__(self, input_ids: Ids, scores: Ids) -> Ids:
        scores = scores.clone()
        scores[:, ::2] = -torch.inf
        return scores


class Failing(LogitsProcessor):
    """Fails at the fourth token."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, input_ids: Ids, scores: Ids) -> Ids:
        self.count += 1
        if self.count == 4:
            raise ZeroDivisionError("on purpose")
        return scores


def test_logits_processors(model: Any, exported: ExportedModel) -> None:
    got = _same(model, exported, _ids(2, 6), logits_processor=[OnlyOdd()])
    assert (got[:, 6:] % 2 == 1).all()


def test_nothing_stays_from_a_call_before(model: Any, exported: ExportedModel) -> None:
    first = _same(model, exported, _ids(1, 6))
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        exported.generate(_ids(2, 9), max_new_tokens=9, min_new_tokens=9, logits_processor=[Failing()])
    assert _same(model, exported, _ids(1, 6)).tolist() == first.tolist()


def test_threads(model: Any, exported: ExportedModel) -> None:
    prompts = [_ids(1 + index % 3, 4 + index) for index in range(6)]
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    expected = [model.generate(prompt, **options).tolist() for prompt in prompts]
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(lambda prompt: exported.generate(prompt, **options).tolist(), prompts))
    assert got == expected


def test_inputs_come_back_unchanged(exported: ExportedModel) -> None:
    inputs = {"input_ids": _ids(2, 6), "attention_mask": torch.ones(2, 6, dtype=torch.int64)}
    inputs["attention_mask"][0, 0] = 0
    before = {name: (value.clone(), value._version) for name, value in inputs.items()}
    config = exported.generation_config.to_dict()
    exported.generate(**inputs, max_new_tokens=4)
    for name, (value, version) in before.items():
        assert inputs[name].tolist() == value.tolist()
        assert inputs[name]._version == version
    assert exported.generation_config.to_dict() == config


# ── going on ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_going_on_with_a_cache(model: Any, made: Made) -> None:
    """The second call gets the whole text so far, more behind it, and the cache of the first."""
    results = []
    for generating in (model, made.exported):
        options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        first = generating.generate(_ids(1, 6), return_dict_in_generate=True, **options)
        ids = torch.cat([first.sequences, _ids(1, 4)], dim=1)
        if made.static:  # a static cache goes by its settings
            options["cache_implementation"] = None
        second = generating.generate(ids, cache=first.cache, **options)
        results.append((first.sequences.tolist(), second.tolist(), first.cache.get_seq_length()))
    assert results[1] == results[0]


@pytest.fixture(scope="session")
def assistants(model: Any) -> dict[str, Any]:
    sample = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]])}
    return {
        name: exporter().export_for_generation(_llama(1), sample, {"dynamic": True}).as_transformers()
        for name, exporter in EXPORTERS.items()
    }


def test_an_exported_assistant(model: Any, made: Made, assistants: dict[str, Any]) -> None:
    """Speculation changes how fast the tokens come, not which."""
    if made.static:
        return
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    expected = model.generate(_ids(1, 6), **options)
    got = made.exported.generate(_ids(1, 6), assistant_model=assistants[made.format], **options)
    assert got.tolist() == expected.tolist()


# ── elsewhere ───────────────────────────────────────────────────────────────────────────────────────────────────────

FRESH = """
import sys
import torch
from polyport import ExportedModel

exported = ExportedModel.from_pretrained(sys.argv[1])
torch.save(exported.generate(**torch.load("inputs.pt")), "ids.pt")
assert "transformers.models.llama.modeling_llama" in sys.modules
"""


def test_in_a_fresh_process(model: Any, made: Made, tmp_path: Path) -> None:
    if made.way == "many tokens":
        return  # the same graph as the static one
    inputs = {"input_ids": _ids(2, 8), "max_new_tokens": 8, "min_new_tokens": 8, "num_beams": 2}
    torch.save(inputs, tmp_path / "inputs.pt")
    done = subprocess.run(
        [sys.executable, "-W", "error:::polyport", "-c", FRESH, str(made.folder)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert torch.load(tmp_path / "ids.pt").tolist() == model.generate(**inputs).tolist()


def test_what_the_settings_are(model: Any, made: Made) -> None:
    loaded = made.exported
    assert loaded.generation is not None
    assert loaded.generation_config is not None
    assert (loaded.generation.multi_token_decode, loaded.generation.static) == WAYS[made.way]
    if made.static:
        assert loaded.generation_config.max_cache_len == ROOM
    whole = loaded.as_transformers()
    assert isinstance(whole, LlamaForCausalLM)
    assert whole.config.to_dict().keys() == model.config.to_dict().keys()
    assert whole.device == torch.device("cpu")
    assert whole.dtype == torch.float32
