"""Caches in the program: what it takes and returns then, and whose cache a call continues."""

from __future__ import annotations

import copy
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM
from transformers.cache_utils import DynamicCache

from polyport import ExportedModel
from polyport.errors import ArtifactError, ConfigError, InputError
from polyport.held import HeldTensor
from polyport_executorch import ExecutorchConfig, ExecutorchExporter
from polyport_executorch.kept import KEPT
from polyport_executorch.methods import STATE

sys.path[:0] = [str(Path(__file__).parents[1])]

import zoo  # noqa: E402

SAMPLE = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]])}
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
ATOL, RTOL = 1e-5, 1e-5


def _exported(model: Any, folder: Path, *, many: bool = True, **options: Any) -> ExportedModel:
    config = ExecutorchConfig(dynamic=True, max_sizes={"batch": 6}, **options)
    made = ExecutorchExporter().export_for_generation(model, SAMPLE, config, multi_token_decode=many)
    made.save_pretrained(folder)
    return ExportedModel.from_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tiny_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stateful") / "export"
    _exported(tiny_llama, path, stateful=True)
    return path


@pytest.fixture(scope="module")
def stateful(folder: Path) -> ExportedModel:
    return ExportedModel.from_pretrained(folder)


@pytest.fixture(scope="module")
def two(tiny_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> ExportedModel:
    """A prefill that returns its cache, and a decode step that keeps it."""
    return _exported(tiny_llama, tmp_path_factory.mktemp("two") / "export", many=False, stateful=True)


@pytest.fixture(scope="module")
def mamba() -> Any:
    config = MambaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4, initializer_range=0.2
    )
    torch.manual_seed(0)
    return MambaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def recurrent(mamba: Any, tmp_path_factory: pytest.TempPathFactory) -> ExportedModel:
    return _exported(mamba, tmp_path_factory.mktemp("recurrent") / "export", many=False, stateful=True)


def _padded(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(1, 64, (length,), generator=generator)
        mask[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}


# ── the program ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_caches_neither_go_in_nor_come_out(stateful: ExportedModel) -> None:
    leaves = [f"cache.layers.{layer}.{kind}" for layer in range(2) for kind in ("keys", "values")]
    metadata = stateful["decode"].metadata
    assert metadata.backend[KEPT] == leaves
    # the record still describes the model, not the program
    assert set(leaves) <= set(metadata.input_names)
    assert set(leaves) <= set(metadata.output_names)
    program = stateful["decode"].program
    assert program.method_names == {"forward", STATE}
    forward = program.metadata("forward")
    # and the input that is as long as the caches are
    assert forward.num_inputs() == len(metadata.inputs) - len(leaves) + 1
    assert forward.num_outputs() == 1


def test_a_step_writes_its_tokens_where_they_stay(stateful: ExportedModel) -> None:
    portable = stateful["decode"].metadata.backend["delegation"]["portable"]
    assert portable["aten::index_put_"] == 4
    assert "aten::copy_" not in portable


def test_layers_share_the_places_of_their_tokens(stateful: ExportedModel) -> None:
    """Which rows of a table a step writes and reads is the same for all caches, and computed once."""
    portable = stateful["decode"].metadata.backend["delegation"]["portable"]
    assert portable["aten::index_select.out"] == 4
    assert portable["aten::mul.out"] == 4  # for what is written and what is read, two each
    assert portable["aten::arange.start_out"] == 9  # six for these, the others for masks and positions


def test_the_file_has_no_room_for_the_caches(folder: Path, tiny_llama: Any) -> None:
    weights = sum(weight.nbytes for weight in tiny_llama.parameters())
    caches = 4 * 6 * 2 * 1024 * 8 * 4
    assert caches > 10 * weights
    assert (folder / "decode.pte").stat().st_size < caches / 2


def test_caches_are_planned_once(tiny_llama: Any) -> None:
    """The memory that a step takes beside the caches doesn't grow with their number."""
    plans = []
    for layers in (1, 3):
        config = copy.deepcopy(tiny_llama.config)
        config.num_hidden_layers = layers
        made = ExecutorchExporter().export_for_generation(
            type(tiny_llama)(config).eval(), SAMPLE, ExecutorchConfig(dynamic=True, stateful=True)
        )
        (plan, _) = made["decode"].program.executorch_program.execution_plan
        plans.append(plan.non_const_buffer_sizes)
    (_, *one), (_, *three) = plans
    cache = 513 * 16 * 4  # tokens, features, bytes
    assert one[1] == 2 * cache
    assert three[1] == 3 * one[1]
    assert three[0] < one[0] + cache


# ── generation ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("way", ["stateful", "two"])
@pytest.mark.parametrize("lengths", [(5,), (3,), (19,), (4, 9, 6)], ids=str)
@pytest.mark.parametrize("beams", [1, 2])
def test_same_ids_as_eager(
    request: pytest.FixtureRequest, tiny_llama: Any, way: str, lengths: tuple[int, ...], beams: int
) -> None:
    exported, prompt = request.getfixturevalue(way), _padded(lengths)
    expected = tiny_llama.generate(**prompt, num_beams=beams, **OPTIONS)
    assert exported.generate(**prompt, num_beams=beams, **OPTIONS).tolist() == expected.tolist()


@pytest.mark.parametrize("lengths", [(5,), (3,), (4, 9, 6)], ids=str)
@pytest.mark.parametrize("beams", [1, 2])
def test_states_of_one_size(
    recurrent: ExportedModel, mamba: Any, lengths: tuple[int, ...], beams: int
) -> None:
    prompt = _padded(lengths)
    expected = mamba.generate(**prompt, num_beams=beams, **OPTIONS)
    assert recurrent.generate(**prompt, num_beams=beams, **OPTIONS).tolist() == expected.tolist()


def test_several_tokens_at_once_on_a_cache(stateful: ExportedModel, tiny_llama: Any) -> None:
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = tiny_llama(input_ids=ids).logits
    module = stateful.as_transformers()
    cache, found = DynamicCache(), []
    for start, end in ((0, 5), (5, 6), (6, 12)):
        out = module(input_ids=ids[:, start:end], cache=cache, use_cache=True)
        found.append(out.logits)
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=ATOL, rtol=RTOL)


def test_only_caches_are_written_in_place() -> None:
    """A mixture of experts writes to tensors of its own, parts of which are read afterwards."""
    model, _, _ = zoo.build("olmoe")
    made = ExecutorchExporter().export_for_generation(
        model, SAMPLE, ExecutorchConfig(dynamic=True, stateful=True)
    )
    assert made["decode"].metadata.backend["delegation"]["portable"]["aten::index_put_"] == 4
    for length in (3, 5, 19):
        prompt = _padded((length,))
        assert made.generate(**prompt, **OPTIONS).tolist() == model.generate(**prompt, **OPTIONS).tolist()


# ── whose cache it is ───────────────────────────────────────────────────────────────────────────────────────────────


def _step(module: Any, cache: Any, ids: torch.Tensor) -> Any:
    return module(input_ids=ids, cache=cache, use_cache=True)


def test_what_is_returned_stands_for_the_cache(stateful: ExportedModel, tiny_llama: Any) -> None:
    ids = torch.tensor([[3, 4, 5, 6]])
    cache = DynamicCache()
    _step(stateful.as_transformers(), cache, ids)
    with torch.no_grad():
        expected = tiny_llama(input_ids=ids).cache
    for ours, theirs in zip(cache.layers, expected.layers, strict=True):
        assert isinstance(ours.keys, HeldTensor)
        assert ours.keys.shape == theirs.keys.shape
        torch.testing.assert_close(ours.keys.read(), theirs.keys, atol=ATOL, rtol=RTOL)
        torch.testing.assert_close(ours.values.read(), theirs.values, atol=ATOL, rtol=RTOL)


def test_two_conversations_take_turns(stateful: ExportedModel, tiny_llama: Any) -> None:
    """The program has room for one: what it has to leave is copied, as long as anything stands for it."""
    module = stateful.as_transformers()
    rows = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(4))
    caches, found = [DynamicCache(), DynamicCache()], [[], []]
    for start, end in ((0, 4), (4, 5), (5, 6), (6, 9)):
        for which in (0, 1):
            out = _step(module, caches[which], rows[which : which + 1, start:end])
            found[which].append(out.logits)
    with torch.no_grad():
        expected = tiny_llama(input_ids=rows).logits
    for which in (0, 1):
        made = torch.cat(found[which], 1)
        torch.testing.assert_close(made, expected[which : which + 1], atol=ATOL, rtol=RTOL)


def test_a_copied_cache_goes_its_own_way(stateful: ExportedModel, tiny_llama: Any) -> None:
    module, cache = stateful.as_transformers(), DynamicCache()
    _step(module, cache, torch.tensor([[3, 4, 5]]))
    branch = copy.deepcopy(cache)
    for own, token in ((cache, 7), (branch, 9)):
        found = _step(module, own, torch.tensor([[token]])).logits
        with torch.no_grad():
            expected = tiny_llama(input_ids=torch.tensor([[3, 4, 5, token]])).logits[:, -1:]
        torch.testing.assert_close(found, expected, atol=ATOL, rtol=RTOL)


def test_what_a_cache_was_can_be_read_until_its_rows_move(stateful: ExportedModel, tiny_llama: Any) -> None:
    module, cache = stateful.as_transformers(), DynamicCache()
    _step(module, cache, torch.tensor([[3, 4, 5], [6, 7, 8]]))
    before = cache.layers[0].keys
    _step(module, cache, torch.tensor([[9], [10]]))
    with torch.no_grad():
        expected = tiny_llama(input_ids=torch.tensor([[3, 4, 5], [6, 7, 8]])).cache.layers[0].keys
    torch.testing.assert_close(before.read(), expected, atol=ATOL, rtol=RTOL)
    cache.reorder_cache(torch.tensor([1, 0]))
    _step(module, cache, torch.tensor([[11], [12]]))
    with pytest.raises(InputError, match="This cache was continued, and what it was before is gone"):
        before.read()


def test_rows_chosen_from_a_cache(stateful: ExportedModel, tiny_llama: Any) -> None:
    module, cache = stateful.as_transformers(), DynamicCache()
    ids = torch.tensor([[3, 4, 5], [6, 7, 8], [9, 10, 11]])
    _step(module, cache, ids)
    cache.batch_select_indices(torch.tensor([2, 0]))
    found = _step(module, cache, torch.tensor([[12], [13]])).logits
    with torch.no_grad():
        expected = tiny_llama(input_ids=torch.tensor([[9, 10, 11, 12], [3, 4, 5, 13]])).logits[:, -1:]
    torch.testing.assert_close(found, expected, atol=ATOL, rtol=RTOL)


def test_threads_take_turns(stateful: ExportedModel, tiny_llama: Any) -> None:
    prompts = [_padded((length,)) for length in (3, 5, 8, 4)]
    expected = [tiny_llama.generate(**prompt, **OPTIONS).tolist() for prompt in prompts]

    def work(index: int) -> list[list[int]]:
        made: list[list[int]] = stateful.generate(**prompts[index % 4], **OPTIONS).tolist()
        return made

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, range(12))) == expected * 3


# ── limits and refusals ─────────────────────────────────────────────────────────────────────────────────────────────


def test_more_rows_than_there_is_room_for(stateful: ExportedModel) -> None:
    with pytest.raises(InputError, match="The axis 'batch' has size 7, which must be between 1 and 6"):
        stateful.generate(**_padded((3,) * 7), **OPTIONS)


def test_it_generates_after_an_error(stateful: ExportedModel, tiny_llama: Any) -> None:
    with pytest.raises(InputError, match="'batch'"):
        stateful.generate(**_padded((3,) * 7), **OPTIONS)
    prompt = _padded((4,))
    assert (
        stateful.generate(**prompt, **OPTIONS).tolist() == tiny_llama.generate(**prompt, **OPTIONS).tolist()
    )


def test_a_damaged_record(folder: Path, tmp_path: Path) -> None:
    exported = ExportedModel.from_pretrained(folder)
    exported.save_pretrained(tmp_path / "damaged")
    record = tmp_path / "damaged" / "export.json"
    content = json.loads(record.read_text())
    text = json.dumps(content).replace('"kept": ["cache.layers.0.keys", ', '"kept": ["input_ids", ')
    record.write_text(text)
    with pytest.raises(ArtifactError, match="'kept'"):
        ExportedModel.from_pretrained(tmp_path / "damaged").generate(**SAMPLE, **OPTIONS)


def test_a_model_without_a_cache_has_nothing_to_keep(small: Any, token_ids: Any) -> None:
    config = ExecutorchConfig(dynamic=True, stateful=True)
    exported = ExecutorchExporter().export(small, token_ids(1, 5), config)
    assert KEPT not in exported["model"].metadata.backend
    assert exported["model"].program.methods == {"forward"}


def test_a_static_cache_stays_the_callers(tiny_llama: Any, static_step: Any, static_cache: Any) -> None:
    config = ExecutorchConfig(dynamic=True, stateful=True)
    exported = ExecutorchExporter().export(tiny_llama, static_step(static_cache(1), 0, 1, 3), config)
    assert KEPT not in exported["model"].metadata.backend


def test_the_option_is_a_flag() -> None:
    with pytest.raises((ConfigError, TypeError), match="stateful"):
        ExecutorchConfig(stateful="yes")  # type: ignore[arg-type]
