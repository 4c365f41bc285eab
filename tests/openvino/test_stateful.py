"""Caches as variables of the runtime: what the graph looks like, and whose cache a call continues."""

from __future__ import annotations

import copy
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openvino as ov
import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM
from transformers.cache_utils import DynamicCache

from polyport import ExportedModel
from polyport.errors import ArtifactError, InputError
from polyport.held import HeldTensor
from polyport_openvino import OpenVINOConfig, OpenVINOExporter

SAMPLE = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]])}
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def _exported(model: Any, folder: Path, *, many: bool = True, **options: Any) -> ExportedModel:
    exporter, config = OpenVINOExporter(), OpenVINOConfig(dynamic=True, **options)
    made = exporter.export_for_generation(model, SAMPLE, config, multi_token_decode=many)
    made.save_pretrained(folder)
    return ExportedModel.from_pretrained(folder)


@pytest.fixture(scope="module")
def stateful(tiny_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> ExportedModel:
    return _exported(tiny_llama, tmp_path_factory.mktemp("stateful") / "export")


@pytest.fixture(scope="module")
def stateless(tiny_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> ExportedModel:
    return _exported(tiny_llama, tmp_path_factory.mktemp("stateless") / "export", stateful=False)


@pytest.fixture(scope="module")
def mamba() -> Any:
    config = MambaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4, initializer_range=0.2
    )
    torch.manual_seed(0)
    return MambaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def recurrent(mamba: Any, tmp_path_factory: pytest.TempPathFactory) -> ExportedModel:
    return _exported(mamba, tmp_path_factory.mktemp("recurrent") / "export", many=False)


def ports(exported: ExportedModel) -> tuple[set[str], set[str]]:
    model = exported["decode"].program
    return {p.get_any_name() for p in model.inputs}, {p.get_any_name() for p in model.outputs}


# ── the graph ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_caches_are_variables_with_a_fused_beam_idx(stateful: ExportedModel) -> None:
    inputs, outputs = ports(stateful)
    assert inputs == {"input_ids", "attention_mask", "position_ids", "logits_to_keep", "beam_idx"}
    assert outputs == {"logits"}
    leaves = {f"cache.layers.{layer}.{kind}" for layer in range(2) for kind in ("keys", "values")}
    metadata = stateful["decode"].metadata
    assert set(metadata.backend["variables"]) == leaves
    assert {
        variable.get_info().variable_id for variable in stateful["decode"].program.get_variables()
    } == leaves
    # the record still describes the model, not the graph
    assert leaves <= set(metadata.input_names)
    assert leaves <= set(metadata.output_names)


def test_without_state_caches_go_in_and_come_out(stateless: ExportedModel) -> None:
    inputs, outputs = ports(stateless)
    leaves = [f"cache.layers.{layer}.{kind}" for layer in range(2) for kind in ("keys", "values")]
    assert {f"input.{leaf}" for leaf in leaves} <= inputs
    assert {f"output.{leaf}" for leaf in leaves} <= outputs
    assert "variables" not in stateless["decode"].metadata.backend
    assert not stateless["decode"].program.get_variables()


def test_states_of_fixed_size_are_variables_too(recurrent: ExportedModel) -> None:
    metadata = recurrent["decode"].metadata
    kinds = Counter(name.split(".")[3] for name in metadata.backend["variables"])
    assert kinds == {"conv_states": 2, "recurrent_states": 2}
    assert metadata.in_place == ()


@pytest.mark.parametrize("name", ["stateful", "stateless"])
def test_a_layer_compiles_to_one_attention_that_repeats_no_heads(
    name: str, request: pytest.FixtureRequest
) -> None:
    program = request.getfixturevalue(name)["decode"].program
    model = ov.Core().compile_model(program, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    nodes = model.get_runtime_model().get_ops()
    kinds = {node.get_friendly_name(): str(node.get_rt_info()["layerType"].astype(str)) for node in nodes}
    executed = Counter(kinds.values())
    assert executed["ScaledDotProductAttention" if name == "stateful" else "Subgraph"] == 2
    assert executed["RoPE"] == 4
    # nothing is between the attention and the projection behind it but its layout
    if name == "stateful":
        behind = [
            kinds[taken.get_node().get_friendly_name()]
            for node in nodes
            if kinds[node.get_friendly_name()] == "ScaledDotProductAttention"
            for taken in node.output(0).get_target_inputs()
        ]
        assert set(behind) <= {"Reshape", "Transpose", "FullyConnected"}
    # heads are repeated along an axis of their own
    made = [output.get_partial_shape() for node in nodes for output in node.outputs()]
    assert all(shape[1] == 1 for shape in made if shape.rank.get_length() > 4)


# ── generation ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["stateful", "stateless"])
def test_writes_what_the_model_writes(
    tiny_llama: Any, name: str, beams: int, request: pytest.FixtureRequest
) -> None:
    exported = request.getfixturevalue(name)
    padded = {
        "input_ids": torch.tensor([[0, 0, 5, 6, 7], [9, 8, 7, 6, 5], [0, 1, 2, 3, 4]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]),
    }
    for prompt in (SAMPLE, padded, SAMPLE):  # the first once more: nothing stays from a call before
        expected = tiny_llama.generate(**prompt, num_beams=beams, **OPTIONS)
        assert torch.equal(exported.generate(**prompt, num_beams=beams, **OPTIONS), expected)


@pytest.mark.parametrize("beams", [1, 3])
def test_writes_what_a_recurrent_model_writes(mamba: Any, recurrent: ExportedModel, beams: int) -> None:
    expected = mamba.generate(**SAMPLE, num_beams=beams, **OPTIONS)
    assert torch.equal(recurrent.generate(**SAMPLE, num_beams=beams, **OPTIONS), expected)


def test_crops_its_cache_for_assisted_generation(tiny_llama: Any, stateful: ExportedModel) -> None:
    expected = tiny_llama.generate(**SAMPLE, **OPTIONS)
    assert torch.equal(stateful.generate(**SAMPLE, assistant_model=tiny_llama, **OPTIONS), expected)
    assert torch.equal(stateful.generate(**SAMPLE, prompt_lookup_num_tokens=2, **OPTIONS), expected)


def test_generations_of_several_threads_do_not_mix(tiny_llama: Any, stateful: ExportedModel) -> None:
    prompts = [{"input_ids": torch.tensor([[i + 3, i + 9, 2 * i + 1]])} for i in range(8)]
    expected = [tiny_llama.generate(**prompt, num_beams=2, **OPTIONS) for prompt in prompts]
    with ThreadPoolExecutor(4) as threads:
        got = list(threads.map(lambda prompt: stateful.generate(**prompt, num_beams=2, **OPTIONS), prompts))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_failed_call_leaves_nothing_behind(tiny_llama: Any, stateful: ExportedModel) -> None:
    class Stops(Exception):
        pass

    def stop(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 7:
            raise Stops
        return scores

    with pytest.raises(Stops):
        stateful.generate(**SAMPLE, logits_processor=[stop], **OPTIONS)
    assert torch.equal(stateful.generate(**SAMPLE, **OPTIONS), tiny_llama.generate(**SAMPLE, **OPTIONS))


# ── single calls ────────────────────────────────────────────────────────────────────────────────────────────────────


def call(model: Any, ids: list[list[int]], cache: Any) -> Any:
    past = 0 if cache is None else cache.get_seq_length()
    tokens = torch.tensor(ids)
    positions = torch.arange(past, past + tokens.shape[1]).expand(len(ids), -1)
    mask = torch.ones(len(ids), past + tokens.shape[1], dtype=torch.int64)
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=mask, position_ids=positions, cache=cache)


def filled(model: Any, ids: list[list[int]]) -> Any:
    return call(model, ids, DynamicCache(config=model.config)).cache


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(got.cache.layers, expected.cache.layers, strict=True):
        for kind in ("keys", "values"):
            torch.testing.assert_close(
                getattr(mine, kind).clone(), getattr(theirs, kind), atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize("name", ["stateful", "stateless"])
def test_what_may_attend_to_nothing_is_as_in_eager(
    tiny_llama: Any, name: str, request: pytest.FixtureRequest
) -> None:
    first, ids = [[0], [9], [0]], torch.tensor([[0, 5, 6, 7], [8, 7, 6, 5], [1, 2, 3, 4]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
    kwargs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1)[:, 1:].clamp(0)}
    got = request.getfixturevalue(name)(**kwargs, cache=filled(tiny_llama, first))
    with torch.no_grad():
        close(got, tiny_llama(**kwargs, cache=filled(tiny_llama, first)))


@pytest.mark.parametrize("ids", [[[3, 4, 5]], [[1, 2, 3, 4], [5, 6, 7, 8], [9, 1, 2, 3]]])
def test_a_call_takes_and_returns_caches(
    tiny_llama: Any, stateful: ExportedModel, ids: list[list[int]]
) -> None:
    given = filled(tiny_llama, ids)
    before = copy.deepcopy(given)
    step = [[row[0]] for row in ids]
    got = call(stateful, step, given)
    assert isinstance(got.cache.layers[0].keys, HeldTensor)
    close(got, call(tiny_llama, step, copy.deepcopy(given)))
    assert torch.equal(given.layers[1].keys, before.layers[1].keys)


def test_what_a_cache_was_is_found_in_what_it_has_grown_to(tiny_llama: Any, stateful: ExportedModel) -> None:
    first = call(stateful, [[7]], filled(tiny_llama, [[3, 4, 5]]))
    then = call(stateful, [[8, 9]], first.cache)
    expected = call(tiny_llama, [[7]], filled(tiny_llama, [[3, 4, 5]]))
    close(first, call(tiny_llama, [[7]], filled(tiny_llama, [[3, 4, 5]])))
    # the same cache, continued another way: it is taken from where it has grown, and neither disturbs the other
    other = call(stateful, [[1]], first.cache)
    close(then, call(tiny_llama, [[8, 9]], copy.deepcopy(expected.cache)))
    close(other, call(tiny_llama, [[1]], copy.deepcopy(expected.cache)))


def test_a_cache_that_is_gone_is_refused(tiny_llama: Any, stateful: ExportedModel) -> None:
    first = call(stateful, [[7], [8]], filled(tiny_llama, [[3, 4, 5], [6, 7, 8]]))
    kept = copy.copy(first.cache.layers[0])
    moved = copy.deepcopy(first.cache)
    first.cache.reorder_cache(torch.tensor([1, 0]))
    call(stateful, [[1], [2]], first.cache)
    with pytest.raises(InputError, match="Copy it before it is continued"):
        kept.keys.clone()
    close(
        call(stateful, [[1], [2]], moved),
        call(tiny_llama, [[1], [2]], copy.deepcopy(moved)),
    )


@pytest.mark.parametrize("rows", [[0, 0, 1], [1]])
def test_rows_may_become_more_or_fewer(tiny_llama: Any, stateful: ExportedModel, rows: list[int]) -> None:
    ids, chosen = [[3, 4, 5], [6, 7, 8]], torch.tensor(rows)
    expected, got = (call(model, [[7], [8]], filled(tiny_llama, ids)) for model in (tiny_llama, stateful))
    for outputs in (expected, got):
        outputs.cache.reorder_cache(chosen)
    step = [[row + 1] for row in rows]
    close(call(stateful, step, got.cache), call(tiny_llama, step, expected.cache))


# ── loading ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "variables",
    [["cache.layers.0.keys"], ["input_ids"], "cache", [["cache.layers.0.keys"]], ["cache.layers.0.keys"] * 2],
)
def test_a_record_of_other_variables_is_refused(
    stateful: ExportedModel, tmp_path: Path, variables: Any
) -> None:
    stateful.save_pretrained(tmp_path / "export")
    manifest = tmp_path / "export" / "export.json"
    record = json.loads(manifest.read_text())
    record["components"]["decode"]["metadata"]["backend"]["variables"] = variables
    manifest.write_text(json.dumps(record))
    with pytest.raises(ArtifactError, match=r"variables|the export's metadata names"):
        ExportedModel.from_pretrained(tmp_path / "export").generate(**SAMPLE, **OPTIONS)
