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
