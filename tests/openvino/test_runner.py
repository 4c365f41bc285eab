"""Running: values, memory, threads, in-place inputs, and what is refused."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openvino.opset15 as opset
import pytest
import torch
from openvino_graphs import TYPES, graph, infos, runner

from polyport import ExportedModel
from polyport.errors import ArtifactError, ExportError, InputError
from polyport.metadata import TensorInfo
from polyport_openvino import OpenVINOConfig, OpenVINOExporter
from polyport_openvino.buffers import to_openvino, to_torch
from polyport_openvino.runner import ModelRunner


@pytest.fixture(scope="module")
def loaded(saved: Path) -> ExportedModel:
    return ExportedModel.from_pretrained(saved)


def test_same_as_eager_at_other_sizes(
    exported: ExportedModel, loaded: ExportedModel, tiny_bert: Any, token_ids: Any
) -> None:
    for batch, length in ((1, 5), (1, 1), (3, 3), (2, 9), (5, 64)):
        inputs = token_ids(batch, length)
        inputs["attention_mask"][-1, length // 2 + 1 :] = 0
        with torch.no_grad():
            expected = tiny_bert(**inputs)
        for export in (exported, loaded):  # fresh from the export, and from its files
            got = export(**inputs)
            torch.testing.assert_close(got.last_hidden_state, expected.last_hidden_state, atol=1e-5, rtol=0)
            torch.testing.assert_close(got.pooler_output, expected.pooler_output, atol=1e-5, rtol=0)


def test_in_a_fresh_process(saved: Path, tiny_bert: Any, token_ids: Any, tmp_path: Path) -> None:
    cases = [token_ids(batch, length) for batch, length in ((1, 5), (3, 5), (1, 2), (2, 33))]
    torch.save(cases, tmp_path / "cases.pt")
    code = """
import sys, torch
from polyport import ExportedModel
export = ExportedModel.from_pretrained(sys.argv[1])
cases = torch.load(sys.argv[2] + "/cases.pt")
torch.save([export(**case).last_hidden_state for case in cases], sys.argv[2] + "/got.pt")
"""
    subprocess.run([sys.executable, "-c", code, str(saved), str(tmp_path)], check=True, timeout=300)
    for case, got in zip(cases, torch.load(tmp_path / "got.pt"), strict=True):
        with torch.no_grad():
            expected = tiny_bert(**case).last_hidden_state
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


# ── threads ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_threads(loaded: ExportedModel, tiny_bert: Any, token_ids: Any) -> None:
    cases = [token_ids(batch, length) for batch, length in ((1, 4), (2, 4), (3, 9))]
    with torch.no_grad():
        expected = [tiny_bert(**case).last_hidden_state for case in cases]

    def work(first: int) -> float:
        worst = 0.0
        kept = []
        for number in range(first, first + 40):
            case = number % len(cases)
            kept.append((case, loaded(**cases[case]).last_hidden_state))
        for case, got in kept:  # nobody wrote to a result while the others ran
            worst = max(worst, float((got - expected[case]).abs().max()))
        return worst

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(work, range(8))) < 1e-5


def test_requests_are_used_again(loaded: ExportedModel, token_ids: Any) -> None:
    caller = loaded.caller("model").runner
    assert isinstance(caller, ModelRunner)
    inputs = [token_ids(1, 4)[name] for name in loaded["model"].metadata.input_names]
    for _ in range(3):
        caller(inputs)
    before = list(caller._pool._free)
    for _ in range(3):
        caller(inputs)
    assert list(caller._pool._free) == before


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_calls_change_no_inputs(loaded: ExportedModel, token_ids: Any) -> None:
    inputs = token_ids(2, 5)
    given = copy.deepcopy(inputs)
    first = loaded(**inputs).last_hidden_state
    kept = first.clone()
    loaded(**token_ids(2, 5))
    assert all(torch.equal(inputs[name], given[name]) for name in given)
    torch.testing.assert_close(first, kept, atol=0, rtol=0)  # nobody writes to an output afterwards


def _values(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    numbers = torch.arange(int(np.prod(shape)))
    return (numbers % 2 == 0 if dtype == "bool" else numbers.to(getattr(torch, dtype))).reshape(shape)


@pytest.mark.parametrize("fixed", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("shape", [(2, 3), (0,), (2, 0, 3), ()], ids=str)
@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_and_empty_tensors(dtype: str, shape: tuple[int, ...], fixed: bool) -> None:
    sizes = shape if fixed else tuple(f"n{axis}" for axis in range(len(shape)))
    inputs = infos(x=(dtype, *sizes))
    same = opset.unsqueeze
    model = graph(inputs, ["y"], lambda x: opset.squeeze(same(x, opset.constant([0])), opset.constant([0])))
    run = runner(model, inputs, infos(y=(dtype, *sizes)))
    value = _values(dtype, shape)
    (got,) = run([value])
    assert got.dtype == value.dtype
    assert got.shape == value.shape
    assert torch.equal(got, value)
    got.zero_()
    assert torch.equal(value, _values(dtype, shape))  # the output is a memory of its own
    (again,) = run([value])
    assert torch.equal(again, value)
    assert not got.any()


@pytest.mark.parametrize("fixed", [False, True], ids=["dynamic", "static"])
def test_input_that_comes_back(fixed: bool) -> None:
    """A copy, unless the record says that it is the caller's own tensor."""
    inputs = infos(x=("float32", *([2, 3] if fixed else ["a", "b"])))
    outputs = {**infos(y=("float32", "a", "b"), z=("float32", "a", "b"))}
    run = runner(graph(inputs, ["y", "z"], lambda x: [x, opset.relu(x)]), inputs, outputs)
    value = torch.tensor([[-1.0, 2, 3], [4, -5, 6]])
    y, z = run([value])
    assert torch.equal(y, value)
    assert torch.equal(z, value.relu())
    assert y.data_ptr() != value.data_ptr()
    y.zero_()
    assert value.sum() == 9


def test_passed_through_is_the_callers_own() -> None:
    inputs = infos(x=("float32", "n"), c=("float32", "n"))
    outputs = infos(c=("float32", "n"), y=("float32", "n"))
    model = graph(inputs, ["y"], lambda x, c: opset.add(x, c))
    run = runner(model, inputs, outputs, backend={"passed_through": {"c": "c"}})
    x, c = torch.ones(3), torch.arange(3.0)
    got = run([x, c])
    assert got[0] is c
    assert got[1].tolist() == [1, 2, 3]


@pytest.mark.parametrize("fixed", [False, True], ids=["dynamic", "static"])
def test_outputs_of_one_value_are_two_memories(fixed: bool) -> None:
    inputs = infos(x=("float32", 4 if fixed else "n"))

    def make(x: Any) -> list[Any]:
        once = opset.relu(x)
        return [once, opset.reshape(once, opset.constant([2, 2]), False), opset.relu(x)]

    outputs = infos(a=("float32", 4), b=("float32", 2, 2), c=("float32", 4))
    a, b, c = runner(graph(inputs, ["a", "b", "c"], make), inputs, outputs)([torch.arange(4.0)])
    a.zero_()
    b.add_(10)
    assert c.tolist() == [0, 1, 2, 3]
    assert b.flatten().tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize("fixed", [False, True], ids=["dynamic", "static"])
def test_results_are_kept_by_nobody_else(fixed: bool) -> None:
    """The memory of a result goes when the caller lets go of it, and stays as long as it doesn't."""
    inputs = infos(x=("float32", 4 if fixed else "n"))
    run = runner(graph(inputs, ["y"], opset.relu), inputs, infos(y=("float32", "n")))
    results = [run([torch.full((4,), float(number))])[0] for number in range(5)]
    gc.collect()
    assert [result.tolist() for result in results] == [[float(number)] * 4 for number in range(5)]
    assert len({result.data_ptr() for result in results}) == 5
    last = weakref.ref(results[-1])
    del results
    gc.collect()
    assert last() is None


def test_inputs_at_one_address_with_other_content_and_sizes() -> None:
    inputs = infos(x=("float32", "n"))
    run = runner(graph(inputs, ["y"], opset.relu), inputs, infos(y=("float32", "n")))
    memory = torch.arange(6.0)
    assert run([memory])[0].tolist() == [0, 1, 2, 3, 4, 5]
    memory.add_(1)
    assert run([memory])[0].tolist() == [1, 2, 3, 4, 5, 6]
    assert run([memory[:2]])[0].tolist() == [1, 2]
    assert run([memory[2:]])[0].tolist() == [3, 4, 5, 6]
    assert run([torch.empty(0)])[0].tolist() == []
    assert run([memory[3:]])[0].tolist() == [4, 5, 6]


def test_read_only_memory(loaded: ExportedModel, token_ids: Any) -> None:
    inputs = token_ids(1, 3)
    expected = loaded(**inputs).last_hidden_state
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    for array in arrays.values():
        array.flags.writeable = False
    torch.testing.assert_close(loaded(**arrays).last_hidden_state, expected, atol=0, rtol=0)
    with torch.inference_mode():
        frozen = {name: tensor.clone() for name, tensor in inputs.items()}
    torch.testing.assert_close(loaded(**frozen).last_hidden_state, expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.bool, torch.float8_e4m3fn, torch.int64]
)
def test_memory_is_shared(dtype: torch.dtype) -> None:
    value = torch.tensor([1, 0, 1, 1]).to(dtype)
    shared = to_openvino(value)
    assert shared.data.ctypes.data == value.data_ptr()
    back = to_torch(shared)
    assert back.dtype == dtype
    assert back.data_ptr() == value.data_ptr()


# ── inputs that are changed ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fixed", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_static_caches_are_written_where_they_lie(fixed: bool, dtype: str) -> None:
    count = 4
    length: Any = 16 if fixed else "length"
    caches = infos(**{f"cache.{i}": (dtype, 1, 2, length, 4) for i in range(count)})
    inputs = {**caches, **infos(new=(dtype, 1, 2, 1, 4), at=("int64", 1))}
    names = [f"output.{name}" for name in caches]
    ports = {
        **{f"input.{name}": info for name, info in caches.items()},
        "new": inputs["new"],
        "at": inputs["at"],
    }

    def make(*nodes: Any) -> list[Any]:
        *buffers, new, at = nodes
        written = [opset.scatter_update(buffer, at, new, opset.constant(2)) for buffer in buffers]
        before = opset.reduce_sum(opset.concat(buffers, 0), opset.constant([0, 1, 2, 3]))
        return [before, *written]

    run = runner(
        graph(ports, ["before", *names], make), inputs, infos(before=(dtype,)), in_place=tuple(caches)
    )
    kind = getattr(torch, dtype)
    buffers = [torch.zeros(1, 2, 16, 4, dtype=kind) for _ in range(count)]
    with torch.inference_mode():
        buffers[1] = buffers[1].clone()
    places = [buffer.data_ptr() for buffer in buffers]
    for step in range(3):
        new = torch.full((1, 2, 1, 4), step + 1.0, dtype=kind)
        expected = sum(float(buffer.float().sum()) for buffer in buffers)
        (before,) = run([*buffers, new, torch.tensor([step])])
        assert float(before) == expected  # what was there is read before it is overwritten
    assert [buffer.data_ptr() for buffer in buffers] == places
    for buffer in buffers:
        assert buffer[0, 0, :, 0].tolist() == [1, 2, 3] + [0] * 13


def test_changed_input_takes_the_content_of_another() -> None:
    inputs = infos(a=("float32", "n"), b=("float32", "n"))
    ports = {"input.a": inputs["a"], "b": inputs["b"]}
    model = graph(ports, ["y", "output.a"], lambda a, b: [opset.add(a, b), b])
    run = runner(model, inputs, infos(y=("float32", "n")), in_place=("a",))
    a, b = torch.ones(3), torch.arange(3.0)
    (y,) = run([a, b])
    assert y.tolist() == [1, 2, 3]
    assert a.tolist() == b.tolist() == [0, 1, 2]


def test_static_cache_of_a_model(
    tiny_llama: Any, static_cache: Any, static_step: Any, check_static_cache: Any, tmp_path: Path
) -> None:
    export = OpenVINOExporter().export(
        tiny_llama, static_step(static_cache(2), 0, 2, 3), OpenVINOConfig(dynamic=True)
    )
    export.save_pretrained(tmp_path / "out")
    check_static_cache(export)
    check_static_cache(ExportedModel.from_pretrained(tmp_path / "out"))


# ── ports ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_names_of_another_tool() -> None:
    """By position where the names differ."""
    inputs = infos(x=("float32", 2))
    run = runner(graph({"args_0": inputs["x"]}, ["output_0"], opset.relu), inputs, infos(y=("float32", 2)))
    assert run([torch.ones(2)])[0].tolist() == [1.0, 1.0]


def test_order_of_another_tool() -> None:
    """By name where they agree."""
    one = TensorInfo("", "float32", (1,))
    model = graph({"b": one, "a": one}, ["s", "d"], lambda b, a: [opset.add(a, b), opset.subtract(a, b)])
    run = runner(model, infos(a=("float32", 1), b=("float32", 1)), infos(d=("float32", 1), s=("float32", 1)))
    assert [x.item() for x in run([torch.tensor([5.0]), torch.tensor([2.0])])] == [3.0, 7.0]


def test_graph_that_the_metadata_does_not_describe() -> None:
    one = infos(x=("float32", 1))
    model = graph(one, ["y"], opset.relu)
    with pytest.raises(ArtifactError, match=r"The graph takes x, the export's metadata names x, z\."):
        runner(model, infos(x=("float32", 1), z=("float32", 1)), infos(y=("float32", 1)))
    with pytest.raises(ArtifactError, match=r"The graph returns y, the export's metadata names \."):
        runner(model, one, {})


# ── refused ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_graph_that_openvino_cannot_compile() -> None:
    inputs = infos(x=("float32", "n"))

    def make(x: Any) -> Any:
        # no kernel of the CPU's has so many axes
        shape = opset.concat([opset.shape_of(x), opset.constant([1] * 80)], 0)
        return opset.log_softmax(opset.reshape(x, shape, False), 0)

    with pytest.raises((ExportError, InputError)) as caught:
        runner(graph(inputs, ["y"], make), inputs, infos(y=("float32", "n")))([torch.ones(2)])
    assert "OpenVINO" in str(caught.value)
    assert ".cpp" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_that_the_graph_cannot_take() -> None:
    inputs = infos(x=("float32", "n"))
    run = runner(
        graph(inputs, ["y"], lambda x: opset.reshape(x, opset.constant([2, 2]), False)),
        inputs,
        infos(y=("float32", 2, 2)),
    )
    with pytest.raises(InputError, match="OpenVINO can't run the graph on these inputs: ") as caught:
        run([torch.ones(5)])
    assert ".cpp" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert run([torch.ones(4)])[0].tolist() == [[1, 1], [1, 1]]
