"""Running: values, forms of inputs, memory, threads, in-place inputs, and what is refused."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from transformers import ConvNextConfig, ConvNextModel, T5Config, T5Model

from polyport import ExportedModel
from polyport.errors import ArtifactError, InputError
from polyport.pipeline import RunRequest
from polyport_executorch import ExecutorchConfig, ExecutorchExporter
from polyport_executorch.runner import ProgramRunner

DYNAMIC = ExecutorchConfig(dynamic=True)


def eager(model: Any, inputs: Any) -> Any:
    with torch.no_grad():
        return model(**inputs)


def left_padded(inputs: dict[str, Any]) -> dict[str, Any]:
    """Each row lacks one more token on the left than the row after it."""
    rows = len(inputs["input_ids"])
    for row in range(rows - 1):
        inputs["attention_mask"][row, : rows - 1 - row] = 0
    return inputs


# ── values ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shape", [(1, 5), (3, 5), (1, 1), (3, 2), (2, 33), (4, 64)])
def test_same_as_eager(
    exported: ExportedModel, loaded: ExportedModel, tiny_bert: Any, token_ids: Any, shape: tuple[int, int]
) -> None:
    inputs = token_ids(*shape)
    expected = eager(tiny_bert, inputs)
    for export in (exported, loaded):  # fresh from the export, and from its files
        got = export(**inputs)
        assert type(got) is type(expected)
        assert list(got) == list(expected)
        for name in expected:
            assert got[name].dtype == expected[name].dtype
            torch.testing.assert_close(got[name], expected[name], atol=1e-5, rtol=1e-5)


def test_left_padded(exported: ExportedModel, tiny_bert: Any, token_ids: Any) -> None:
    inputs = left_padded(token_ids(3, 7))
    got, expected = exported(**inputs), eager(tiny_bert, inputs)
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(
        got.last_hidden_state[seen], expected.last_hidden_state[seen], atol=1e-5, rtol=1e-5
    )
    assert not torch.allclose(got.last_hidden_state, exported(**token_ids(3, 7)).last_hidden_state, atol=1e-3)


def test_decoder(tiny_llama: Any, token_ids: Any) -> None:
    sample = {**token_ids(1, 6), "use_cache": False}
    exported = ExecutorchExporter().export(tiny_llama, sample, DYNAMIC)
    for inputs in (token_ids(1, 6), token_ids(3, 17), token_ids(2, 1), left_padded(token_ids(3, 9))):
        given = {**inputs, "use_cache": False}
        got, expected = exported(**given), eager(tiny_llama, given)
        assert type(got) is type(expected)
        assert got.past_key_values is None
        seen = inputs["attention_mask"].bool()
        torch.testing.assert_close(got.logits[seen], expected.logits[seen], atol=1e-5, rtol=1e-5)


def test_images() -> None:
    torch.manual_seed(0)
    config = ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=32)
    model = ConvNextModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layer_scale" in name:  # next to nothing in a fresh model
                parameter.fill_(0.5)
    exported = ExecutorchExporter().export(model, {"pixel_values": torch.randn(1, 3, 32, 32)}, DYNAMIC)
    for shape in ((1, 3, 32, 32), (3, 3, 32, 32), (2, 3, 64, 40)):
        image = torch.randn(shape)
        expected = eager(model, {"pixel_values": image})
        for pixels in (image, image.to(memory_format=torch.channels_last)):
            got = exported(pixel_values=pixels)
            torch.testing.assert_close(
                got.last_hidden_state, expected.last_hidden_state, atol=1e-5, rtol=1e-5
            )
            torch.testing.assert_close(got.pooler_output, expected.pooler_output, atol=1e-5, rtol=1e-5)


def test_encoder_decoder(token_ids: Any) -> None:
    torch.manual_seed(0)
    model = T5Model(
        T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    ).eval()

    def inputs(batch: int, length: int, written: int) -> dict[str, Any]:
        given = token_ids(batch, written)["input_ids"]
        return {**token_ids(batch, length), "decoder_input_ids": given, "use_cache": False}

    exported = ExecutorchExporter().export(model, inputs(1, 7, 4), DYNAMIC)
    for sizes in ((1, 7, 4), (3, 19, 1), (2, 2, 11)):
        given = inputs(*sizes)
        got, expected = exported(**given), eager(model, given)
        torch.testing.assert_close(got.last_hidden_state, expected.last_hidden_state, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            got.encoder_last_hidden_state, expected.encoder_last_hidden_state, atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("option", ["alloc_graph_input", "alloc_graph_output"])
def test_memory_of_the_caller(small: Any, token_ids: Any, option: str) -> None:
    exported = ExecutorchExporter().export(
        small, token_ids(1, 5), ExecutorchConfig(dynamic=True, **{option: False})
    )
    kept = []
    for shape in ((1, 5), (4, 48), (3, 9)):
        inputs = token_ids(*shape)
        kept.append((exported(**inputs).last_hidden_state, eager(small, inputs).last_hidden_state))
    for got, expected in kept:
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


# ── forms of inputs ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_not_contiguous(loaded: ExportedModel, tiny_bert: Any, token_ids: Any) -> None:
    inputs = token_ids(3, 8)
    expected = eager(tiny_bert, {name: tensor[:, ::2] for name, tensor in inputs.items()}).last_hidden_state
    spread = {name: tensor[:, ::2] for name, tensor in inputs.items()}
    turned = {name: tensor[:, ::2].T.contiguous().T for name, tensor in inputs.items()}
    expanded = {**spread, "attention_mask": torch.ones(1, 1, dtype=torch.int64).expand(3, 4)}
    for given in (spread, turned, expanded):
        assert not any(tensor.is_contiguous() for tensor in given.values())
        torch.testing.assert_close(loaded(**given).last_hidden_state, expected, atol=1e-5, rtol=1e-5)


def test_narrower_integers(loaded: ExportedModel, tiny_bert: Any, token_ids: Any) -> None:
    inputs = {name: tensor.int() for name, tensor in token_ids(2, 6).items()}
    got, expected = loaded(**inputs), eager(tiny_bert, inputs)
    torch.testing.assert_close(got.last_hidden_state, expected.last_hidden_state, atol=1e-5, rtol=1e-5)


def test_traced_with_narrower_integers(small: Any, token_ids: Any) -> None:
    def narrow(batch: int, length: int) -> dict[str, Any]:
        return {name: tensor.int() for name, tensor in token_ids(batch, length).items()}

    exported = ExecutorchExporter().export(small, narrow(1, 5), DYNAMIC)
    assert {info.dtype for info in exported["model"].metadata.inputs} == {"int32"}
    for shape in ((1, 5), (3, 9)):
        got, expected = exported(**narrow(*shape)), eager(small, narrow(*shape))
        torch.testing.assert_close(got.last_hidden_state, expected.last_hidden_state, atol=1e-5, rtol=1e-5)


def test_lists_and_arrays(loaded: ExportedModel, tiny_bert: Any, token_ids: Any) -> None:
    inputs = token_ids(2, 6)
    expected = eager(tiny_bert, inputs).last_hidden_state
    frozen = {name: tensor.numpy().copy() for name, tensor in inputs.items()}
    for array in frozen.values():
        array.flags.writeable = False
    for given in (
        {name: tensor.tolist() for name, tensor in inputs.items()},
        {name: tensor.numpy() for name, tensor in inputs.items()},
        {name: tensor.numpy().astype(np.int32) for name, tensor in inputs.items()},
        frozen,
        {"input_ids": inputs["input_ids"]},  # the mask may be left out
    ):
        got = loaded(**given).last_hidden_state
        assert isinstance(got, torch.Tensor)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_results_are_the_callers(exported: ExportedModel, loaded: ExportedModel, token_ids: Any) -> None:
    """Nobody writes to a result at the next call, and the runtime doesn't see what the caller writes to it."""
    for export in (exported, loaded):
        first = export(**token_ids(2, 5))
        kept = copy.deepcopy(first)
        second = export(**token_ids(2, 9))
        third = export(**token_ids(2, 5))
        for name in first:
            assert torch.equal(first[name], kept[name])
            assert len({result[name].data_ptr() for result in (first, second, third)}) == 3
        third.last_hidden_state.zero_()
        assert torch.equal(first.last_hidden_state, kept.last_hidden_state)
        assert torch.equal(export(**token_ids(2, 5)).last_hidden_state, kept.last_hidden_state)


def test_results_outlive_the_export(saved: Path, tiny_bert: Any, token_ids: Any) -> None:
    inputs = token_ids(3, 6)
    got = ExportedModel.from_pretrained(saved)(**inputs).last_hidden_state
    torch.testing.assert_close(got, eager(tiny_bert, inputs).last_hidden_state, atol=1e-5, rtol=1e-5)


def test_inputs_stay(loaded: ExportedModel, token_ids: Any) -> None:
    inputs = token_ids(2, 5)
    given = copy.deepcopy(inputs)
    loaded(**inputs)
    assert all(torch.equal(inputs[name], given[name]) for name in given)


def test_threads(loaded: ExportedModel, tiny_bert: Any, token_ids: Any) -> None:
    cases = [token_ids(batch, length) for batch, length in ((1, 4), (2, 4), (3, 9), (4, 30))]
    expected = [eager(tiny_bert, case).last_hidden_state for case in cases]

    def work(first: int) -> float:
        kept = []
        for number in range(first, first + 40):
            case = number % len(cases)
            kept.append((case, loaded(**cases[case]).last_hidden_state))
        # nobody wrote to a result while the others ran
        return max(float((got - expected[case]).abs().max()) for case, got in kept)

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(work, range(8))) < 1e-5


# ── inputs that are changed ─────────────────────────────────────────────────────────────────────────────────────────


def test_static_cache(
    tiny_llama: Any, static_cache: Any, static_step: Any, check_static_cache: Any, tmp_path: Path
) -> None:
    export = ExecutorchExporter().export(tiny_llama, static_step(static_cache(2), 0, 2, 3), DYNAMIC)
    export.save_pretrained(tmp_path / "out")
    check_static_cache(export)
    check_static_cache(ExportedModel.from_pretrained(tmp_path / "out"))


# ── refused ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("device", ["cuda", "xpu", "nonsense"])
def test_devices(saved: Path, token_ids: Any, device: str) -> None:
    exported = ExportedModel.from_pretrained(saved, device=device)
    with pytest.raises(InputError, match=f"device='{device}' can't be chosen"):
        exported(**token_ids(1, 5))
    assert exported.to("cpu")(**token_ids(1, 5)).last_hidden_state.device.type == "cpu"


def test_options(saved: Path, token_ids: Any) -> None:
    exported = ExportedModel.from_pretrained(saved, threads=2)
    with pytest.raises(InputError, match="threads"):
        exported(**token_ids(1, 5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda inputs: {"attention_mask": inputs["attention_mask"]}, "'input_ids' is missing"),
        (lambda inputs: {"input_ids": inputs["input_ids"][0]}, "'input_ids' has 1 axes"),
        (lambda inputs: {"input_ids": inputs["input_ids"].float()}, "'input_ids' must be int64, not float32"),
        (lambda inputs: {**inputs, "attention_mask": torch.ones(2, 4)[:, :3].long()}, "'attention_mask' has size 3"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit(loaded: ExportedModel, token_ids: Any, change: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        loaded(**change(token_ids(2, 5)))
    assert loaded(**token_ids(2, 5)).last_hidden_state.shape == (2, 5, 32)


def test_inputs_that_only_the_runtime_refuses(exported: ExportedModel, token_ids: Any) -> None:
    """It can still run afterwards."""
    component = exported["model"]
    runner = ProgramRunner(component.program, component.metadata, RunRequest())
    good = [token_ids(2, 5)[name] for name in component.metadata.input_names]
    expected = [tensor.clone() for tensor in runner(good)]
    with pytest.raises(InputError, match="ExecuTorch can't run the program on these inputs"):
        runner([tensor.float() for tensor in good])
    with pytest.raises(InputError, match="ExecuTorch can't run the program on these inputs"):
        runner(good[:1])
    assert all(map(torch.equal, runner(good), expected))


def test_record_of_another_program(exported: ExportedModel) -> None:
    component = exported["model"]
    other = attrs.evolve(component.metadata, inputs=component.metadata.inputs[:1])
    with pytest.raises(ArtifactError, match=r"takes 2 inputs and returns 2 outputs, .* says 1 and 2\."):
        ProgramRunner(component.program, other, RunRequest())
