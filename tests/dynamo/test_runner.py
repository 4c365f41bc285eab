from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from polyport import DynamoConfig, DynamoExporter, ExportedModel
from polyport.errors import ArtifactError, InputError
from polyport.metadata import ExportMetadata, TensorInfo
from polyport_dynamo.compact import compact
from polyport_dynamo.runner import ProgramRunner


@pytest.fixture(scope="module")
def loaded(saved: Path) -> ExportedModel:
    return ExportedModel.from_pretrained(saved)


def test_same_as_eager_at_other_sizes(loaded: ExportedModel, tiny_bert: Any, token_ids: Any) -> None:
    for batch, length in ((1, 1), (2, 9), (5, 64)):
        inputs = token_ids(batch, length)
        inputs["attention_mask"][-1, length // 2 + 1 :] = 0
        with torch.no_grad():
            expected = tiny_bert(**inputs)
        got = loaded(**inputs)
        torch.testing.assert_close(got.last_hidden_state, expected.last_hidden_state, atol=1e-6, rtol=0)


def test_length_above_the_models_own(loaded: ExportedModel, token_ids: Any) -> None:
    with pytest.raises(InputError, match=r"axis 'sequence' has size 65, which must be between 1 and 64"):
        loaded(**token_ids(1, 65))


def test_threads(loaded: ExportedModel, tiny_bert: Any, token_ids: Any) -> None:
    cases = [token_ids(batch, length) for batch, length in ((1, 4), (2, 4), (3, 9))]
    with torch.no_grad():
        expected = [tiny_bert(**case).last_hidden_state for case in cases]

    def work(_: int) -> float:
        worst = 0.0
        for number in range(200):
            case = number % len(cases)
            got = loaded(**cases[case]).last_hidden_state
            worst = max(worst, float((got - expected[case]).abs().max()))
        return worst

    with ThreadPoolExecutor(2) as pool:
        assert max(pool.map(work, range(2))) < 1e-6


def test_calls_change_nothing(loaded: ExportedModel, token_ids: Any) -> None:
    program = loaded.program
    before = {name: tensor.clone() for name, tensor in (program.state_dict | program.constants).items()}
    inputs = token_ids(2, 5)
    given = copy.deepcopy(inputs)
    first = loaded(**inputs).last_hidden_state
    kept = first.clone()
    again = loaded(**inputs).last_hidden_state
    assert all(torch.equal(inputs[name], given[name]) for name in given)
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in (program.state_dict | program.constants).items()
    )
    torch.testing.assert_close(again, kept, atol=0, rtol=0)
    torch.testing.assert_close(first, kept, atol=0, rtol=0)  # nobody writes to an output afterwards


def test_outputs_carry_no_gradients(loaded: ExportedModel, token_ids: Any) -> None:
    output = loaded(**token_ids(1, 3))
    assert not output.last_hidden_state.requires_grad
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps", "cuda:7"])
def test_device_that_is_not_there(loaded: ExportedModel, saved: Path, token_ids: Any, device: str) -> None:
    if torch.device(device).type == torch._C._get_accelerator().type:
        device = "cuda:99"
    export = ExportedModel.from_pretrained(saved, device=device)
    with pytest.raises(InputError, match=f"device '{device}' is not available to PyTorch here"):
        export(**token_ids(1, 3))


def test_device_that_is_none(saved: Path, token_ids: Any) -> None:
    with pytest.raises(InputError, match="device 'toaster' is not available"):
        ExportedModel.from_pretrained(saved, device="toaster")(**token_ids(1, 3))


def test_runs_where_its_weights_are(loaded: ExportedModel) -> None:
    assert loaded.device == torch.device("cpu")
    assert loaded.to("cpu").device == torch.device("cpu")
    assert loaded.dtype == torch.float32


def test_no_options(saved: Path, token_ids: Any) -> None:
    with pytest.raises(InputError, match=r"no runner option 'providers'\. Valid options: none"):
        ExportedModel.from_pretrained(saved, providers=["x"])(**token_ids(1, 3))


def test_the_models_weights_are_shared_not_copied(tiny_bert: Any, exported: ExportedModel) -> None:
    weight = exported.program.state_dict["embeddings.word_embeddings.weight"]
    assert weight.data_ptr() == tiny_bert.embeddings.word_embeddings.weight.data_ptr()


def test_a_program_without_weights() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    info = TensorInfo("x", "float32", (2,))
    metadata = ExportMetadata(inputs=(info,), outputs=(info,))
    runner = ProgramRunner(torch.export.export(Model(), (torch.ones(2),)), metadata, None)
    assert runner.device == "cpu"
    assert runner([torch.ones(2)])[0].tolist() == [2.0, 2.0]


def test_a_program_that_is_not_the_recorded_one(exported: ExportedModel) -> None:
    with pytest.raises(
        ArtifactError, match="takes 2 tensors and returns 2, but the export's metadata describes"
    ):
        ProgramRunner(exported.program, ExportMetadata(), None)


def test_bare_program(exported: ExportedModel, tmp_path: Path, token_ids: Any) -> None:
    exported.save(tmp_path / "bert.pt2")
    program = torch.export.load(str(tmp_path / "bert.pt2"))
    assert program.module()(**token_ids(2, 4)).last_hidden_state.shape == (2, 4, 32)


def test_static_export_takes_its_size_only(tiny_bert: Any, token_ids: Any) -> None:
    export = DynamoExporter().export(tiny_bert, token_ids(2, 5), DynamoConfig())
    assert export(**token_ids(2, 5)).last_hidden_state.shape == (2, 5, 32)
    with pytest.raises(InputError, match=r"has size 3, which must be 2"):
        export(**token_ids(3, 5))


def test_bounds_of_the_user_hold(tiny_bert: Any, token_ids: Any) -> None:
    batch = torch.export.Dim("batch", min=1, max=4)
    shapes = {name: {0: batch} for name in ("input_ids", "attention_mask")}
    export = DynamoExporter().export(tiny_bert, token_ids(2, 5), DynamoConfig(dynamic_shapes=shapes))
    for size in (1, 4):
        assert export(**token_ids(size, 5)).last_hidden_state.shape == (size, 5, 32)
    with pytest.raises(InputError, match=r"has size 5, which must be between 1 and 4"):
        export(**token_ids(5, 5))


# ── what a step writes to ───────────────────────────────────────────────────────────────────────────────────────────


def _filled(model: Any, ids: torch.Tensor) -> Any:
    """A static cache that holds these tokens."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=12)
    with torch.no_grad():
        model(input_ids=ids, cache=cache)
    return cache


def _prompt(seed: int) -> torch.Tensor:
    return torch.randint(1, 64, (1, 5), generator=torch.Generator().manual_seed(seed))


def _tensors(cache: Any) -> list[torch.Tensor]:
    return [
        tensor for layer in cache.layers for tensor in (layer.keys, layer.values, layer.cumulative_length)
    ]


MASK = torch.ones(1, 6, dtype=torch.int64)


@pytest.fixture(scope="module")
def step(tiny_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ExportedModel]:
    """A decode step with a static cache, fresh and loaded."""
    ids = _prompt(0)
    sample = {"input_ids": ids[:, :1], "attention_mask": MASK, "cache": _filled(tiny_llama, ids)}
    export = DynamoExporter().export(tiny_llama, sample, DynamoConfig())
    folder: Path = tmp_path_factory.mktemp("step") / "export"
    export.save_pretrained(folder)
    return {"fresh": export, "loaded": ExportedModel.from_pretrained(folder)}


@pytest.mark.parametrize("which", ["fresh", "loaded"])
def test_a_static_cache_is_updated_in_place(
    step: dict[str, ExportedModel], tiny_llama: Any, which: str
) -> None:
    ids = _prompt(1)
    cache, wanted = _filled(tiny_llama, ids), _filled(tiny_llama, ids)
    mine = _tensors(cache)
    for number in range(3):
        token = _prompt(2 + number)[:, :1]
        with torch.no_grad():
            expected = tiny_llama(input_ids=token, attention_mask=MASK, cache=wanted)
        got = step[which](input_ids=token, attention_mask=MASK, cache=cache)
        torch.testing.assert_close(got.logits, expected.logits, atol=1e-5, rtol=0)
        assert all(one is other for one, other in zip(_tensors(got.cache), mine, strict=True))
        for ours, theirs in zip(mine, _tensors(wanted), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        assert int(mine[2]) == 6 + number


@pytest.mark.parametrize("which", ["fresh", "loaded"])
def test_threads_with_caches_of_their_own(
    step: dict[str, ExportedModel], tiny_llama: Any, which: str
) -> None:
    def decode(run: Any, seed: int) -> list[torch.Tensor]:
        cache = _filled(tiny_llama, _prompt(seed))
        with torch.no_grad():
            return [
                run(input_ids=_prompt(seed + number)[:, :1], attention_mask=MASK, cache=cache).logits
                for number in range(6)
            ]

    expected = [decode(tiny_llama, seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            found = list(pool.map(lambda seed: decode(step[which], seed), range(4)))
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), atol=1e-5, rtol=0)


def test_an_input_that_is_returned_is_the_same_tensor() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return y, x.add_(1), x + y

    infos = tuple(TensorInfo(name, "float32", (2,)) for name in "xyz")
    program = torch.export.export(Model(), (torch.zeros(2), torch.zeros(2)))
    metadata = ExportMetadata(inputs=infos[:2], outputs=infos)
    x, y = torch.zeros(2), torch.ones(2)
    first, second, third = ProgramRunner(program, metadata)([x, y])
    assert first is y
    assert second is x
    assert x.tolist() == [1.0, 1.0]
    assert third.tolist() == [2.0, 2.0]


# ── what is left out of a call ──────────────────────────────────────────────────────────────────────────────────────


def test_a_compact_graph_is_the_same_function(exported: ExportedModel, token_ids: Any) -> None:
    program = exported.program
    weights = [
        (program.state_dict | program.constants)[spec.target]
        for spec in program.graph_signature.input_specs
        if spec.target is not None
    ]
    for batch, length in ((1, 1), (3, 7)):
        inputs = [*weights, *token_ids(batch, length).values()]
        with torch.no_grad():
            for ours, theirs in zip(compact(program)(*inputs), program.graph_module(*inputs), strict=True):
                assert torch.equal(ours, theirs)


def test_conversions_that_do_something_stay() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            same = x.to(torch.float32)
            copied = x.to(torch.float32, copy=True)
            other = x.to(torch.float32, memory_format=torch.channels_last)
            copied.add_(1)
            return same, copied, other, x.half().to(torch.float32), x.to(torch.int64)

    x = torch.arange(24.0).reshape(1, 2, 3, 4) + 0.1
    program = torch.export.export(Model(), (x,))
    found, wanted = compact(program)(x), program.graph_module(x)
    assert found[0] is x
    assert found[1] is not x
    assert found[2].stride() == wanted[2].stride() != x.stride()
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_checks_of_values_and_writes_stay() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            size = n.item()
            torch._check(size >= 2)
            torch._check(size <= 5)
            x.mul_(2)  # nothing in the graph uses what this returns
            return torch.ones(size)

    program = torch.export.export(Model(), (torch.ones(2), torch.tensor(3)))
    function, x = compact(program), torch.ones(2)
    assert function(x, torch.tensor(4))[0].shape == (4,)
    assert x.tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError):
        function(x, torch.tensor(7))


def test_control_flow_in_a_compact_graph() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x.to(torch.float32),))

    function = compact(torch.export.export(Model(), (torch.ones(2),)))
    for x in (torch.ones(2), -torch.ones(2)):
        assert torch.equal(function(x)[0], x.sin() if x.sum() > 0 else x.cos())
