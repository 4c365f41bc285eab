from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper

from polyport import ExportedModel, OnnxConfig, OnnxExporter
from polyport.errors import ArtifactError, ExportError, InputError
from polyport.metadata import ExportMetadata, TensorInfo
from polyport.pipeline import RunRequest
from polyport_onnx.runner import SessionRunner


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
        torch.testing.assert_close(got.last_hidden_state, expected.last_hidden_state, atol=1e-5, rtol=0)
        torch.testing.assert_close(got.pooler_output, expected.pooler_output, atol=1e-5, rtol=0)


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
        assert max(pool.map(work, range(2))) < 1e-5


def test_calls_change_no_inputs(loaded: ExportedModel, token_ids: Any) -> None:
    inputs = token_ids(2, 5)
    given = copy.deepcopy(inputs)
    first = loaded(**inputs).last_hidden_state
    kept = first.clone()
    loaded(**token_ids(2, 5))
    assert all(torch.equal(inputs[name], given[name]) for name in given)
    torch.testing.assert_close(first, kept, atol=0, rtol=0)  # nobody writes to an output afterwards


# ── devices and options ─────────────────────────────────────────────────────────────────────────────────────────────


def test_providers(saved: Path, token_ids: Any) -> None:
    for providers in (["CPUExecutionProvider"], "CPUExecutionProvider", [("CPUExecutionProvider", {})]):
        export = ExportedModel.from_pretrained(saved, providers=providers)
        assert export(**token_ids(1, 3)).last_hidden_state.shape == (1, 3, 32)
        assert export.device == torch.device("cpu")


def test_provider_that_is_not_there(saved: Path, token_ids: Any) -> None:
    export = ExportedModel.from_pretrained(saved, providers=["TofuExecutionProvider"])
    with pytest.raises(
        InputError, match=r"no provider 'TofuExecutionProvider' here, only .*CPUExecutionProvider"
    ):
        export(**token_ids(1, 3))


def test_session_options_are_used(saved: Path, token_ids: Any, tmp_path: Path) -> None:
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ExportedModel.from_pretrained(saved, session_options=options)(**token_ids(1, 3))
    assert (tmp_path / "optimized.onnx").exists()


def test_session_options_that_are_none(saved: Path, token_ids: Any) -> None:
    export = ExportedModel.from_pretrained(saved, session_options={"intra_op_num_threads": 1})
    with pytest.raises(InputError, match=r"must be an onnxruntime\.SessionOptions, not dict"):
        export(**token_ids(1, 3))


def test_unknown_option(saved: Path, token_ids: Any) -> None:
    export = ExportedModel.from_pretrained(saved, provider="x")
    with pytest.raises(
        InputError, match=r"no runner option 'provider'\. Valid options: providers, session_options"
    ):
        export(**token_ids(1, 3))


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "xpu", "mps"])
def test_device_that_is_not_there(
    saved: Path, token_ids: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(
        InputError, match=rf"can't run on '{device}' here\. Available providers: CPUExecutionProvider"
    ):
        ExportedModel.from_pretrained(saved, device=device)(**token_ids(1, 3))


def test_device_that_falls_back(saved: Path, token_ids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider that is built in, but whose libraries are missing: ONNX Runtime computes on the CPU and says little."""

    class Session(ort.InferenceSession):  # type: ignore[misc]
        def __init__(self, path: str, options: Any, providers: Any, disabled_optimizers: Any) -> None:
            super().__init__(path, options, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(ort, "InferenceSession", Session)
    monkeypatch.setattr(
        ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    with pytest.raises(InputError, match="CUDAExecutionProvider can't be used here"):
        ExportedModel.from_pretrained(saved, device="cuda")(**token_ids(1, 3))


def test_device_that_is_none(saved: Path, token_ids: Any) -> None:
    with pytest.raises(InputError, match="'toaster' is no device"):
        ExportedModel.from_pretrained(saved, device="toaster")(**token_ids(1, 3))


def test_bfloat16_is_refused_at_export(tiny_bert: Any, token_ids: Any) -> None:
    model = copy.deepcopy(tiny_bert).to(torch.bfloat16)
    with pytest.raises(
        ExportError,
        match=r"BertModel has bfloat16 parameters.*onnx runtime can't compute.*model\.to\(torch\.float32\); it can run "
        r"float32, float16",
    ):
        OnnxExporter().export(model, token_ids(1, 5), OnnxConfig(dynamic=True))


def test_float16(tiny_bert: Any, token_ids: Any) -> None:
    model = copy.deepcopy(tiny_bert).half()
    inputs = token_ids(2, 5)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
    export = OnnxExporter().export(model, inputs, OnnxConfig(dynamic=True))
    got = export(**inputs).last_hidden_state
    assert got.dtype == export.dtype == torch.float16
    torch.testing.assert_close(got, expected, atol=1e-2, rtol=0)


# ── graphs by hand ──────────────────────────────────────────────────────────────────────────────────────────────────

TYPES = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "float16": TensorProto.FLOAT16,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "bool": TensorProto.BOOL,
}


def _identity(dtype: str, shape: tuple[Any, ...], names: tuple[str, str] = ("x", "y")) -> SessionRunner:
    value = helper.make_tensor_value_info
    x, y = names
    graph = helper.make_graph(
        [helper.make_node("Identity", [x], [y])],
        "g",
        [value(x, TYPES[dtype], shape)],
        [value(y, TYPES[dtype], shape)],
    )
    return _runner(graph, (TensorInfo("x", dtype, shape),), (TensorInfo("y", dtype, shape),))


def _runner(graph: Any, inputs: tuple[TensorInfo, ...], outputs: tuple[TensorInfo, ...]) -> SessionRunner:
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(proto)
    return SessionRunner(ir.from_proto(proto), ExportMetadata(inputs=inputs, outputs=outputs), RunRequest())


def _values(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    numbers = torch.arange(int(np.prod(shape)))
    return (numbers % 2 == 0 if dtype == "bool" else numbers.to(getattr(torch, dtype))).reshape(shape)


@pytest.mark.parametrize("bound", [False, True], ids=["copied", "bound"])
@pytest.mark.parametrize("shape", [(2, 3), (0,), (2, 0, 3), ()], ids=str)
@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_and_empty_tensors(dtype: str, shape: tuple[int, ...], bound: bool) -> None:
    """The path by address is the one of a GPU; it has to be right on the CPU too."""
    runner = _identity(dtype, tuple(f"n{axis}" for axis in range(len(shape))))
    runner._bound = bound
    value = _values(dtype, shape)
    (got,) = runner([value])
    assert got.dtype == value.dtype
    assert got.shape == value.shape
    assert torch.equal(got, value)
    got.zero_()
    assert torch.equal(value, _values(dtype, shape))  # the output is a memory of its own


def test_bound_run_computes_the_same(loaded: ExportedModel, token_ids: Any) -> None:
    runner = loaded.caller("model").runner
    assert isinstance(runner, SessionRunner)
    for batch, length in ((1, 1), (3, 7)):
        tensors = [token_ids(batch, length)[name] for name in loaded["model"].metadata.input_names]
        for plain, bound in zip(runner(tensors), runner._run_bound(tensors), strict=True):
            assert torch.equal(plain, bound)


def test_bound_runs_from_threads(loaded: ExportedModel, token_ids: Any) -> None:
    runner = loaded.caller("model").runner
    assert isinstance(runner, SessionRunner)
    cases = [
        [token_ids(batch, 4)[name] for name in loaded["model"].metadata.input_names] for batch in (1, 2, 3)
    ]
    expected = [runner(case)[0] for case in cases]

    def work(number: int) -> bool:
        return torch.equal(runner._run_bound(cases[number % 3])[0], expected[number % 3])

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, range(400)))


def test_bfloat16_goes_by_address() -> None:
    """No numpy type, so no way round it; Cast is among the few operators that the CPU has for it."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.BFLOAT16)],
        "g",
        [value("x", TensorProto.FLOAT, ["n"])],
        [value("y", TensorProto.BFLOAT16, ["n"])],
    )
    runner = _runner(graph, (TensorInfo("x", "float32", ("n",)),), (TensorInfo("y", "", ("n",)),))
    (got,) = runner([torch.tensor([1.5, -2.0])])
    assert got.dtype == torch.bfloat16
    assert got.tolist() == [1.5, -2.0]


def test_names_of_another_tool() -> None:
    """By position where the names differ."""
    runner = _identity("float32", (2,), names=("args_0", "output_0"))
    assert runner([torch.ones(2)])[0].tolist() == [1.0, 1.0]


def test_order_of_another_tool() -> None:
    """By name where they agree."""
    value = helper.make_tensor_value_info
    infos = [value(name, TensorProto.FLOAT, [1]) for name in ("b", "a")]
    graph = helper.make_graph(
        [helper.make_node("Sub", ["a", "b"], ["d"]), helper.make_node("Add", ["a", "b"], ["s"])],
        "g",
        infos,
        [value("s", TensorProto.FLOAT, [1]), value("d", TensorProto.FLOAT, [1])],
    )
    runner = _runner(
        graph,
        (TensorInfo("a", "float32", (1,)), TensorInfo("b", "float32", (1,))),
        (TensorInfo("d", "float32", (1,)), TensorInfo("s", "float32", (1,))),
    )
    assert [x.item() for x in runner([torch.tensor([5.0]), torch.tensor([2.0])])] == [3.0, 7.0]


def test_graph_that_the_metadata_does_not_describe() -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [value], [out])
    x, y = TensorInfo("x", "float32", (1,)), TensorInfo("y", "float32", (1,))
    with pytest.raises(ArtifactError, match=r"The graph takes x, the export's metadata names x, y\."):
        _runner(graph, (x, y), (y,))
    with pytest.raises(ArtifactError, match=r"The graph returns y, the export's metadata names \."):
        _runner(graph, (x,), ())


def test_graph_that_onnxruntime_cannot_load() -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph(
        [helper.make_node("Nothing", ["x"], ["y"], domain="nowhere")], "g", [value], [out]
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("nowhere", 1)]
    model = ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=9))
    info = TensorInfo("x", "float32", (1,))
    with pytest.raises(ExportError, match=r"ONNX Runtime [\d.]+ can't load the graph: .*Nothing"):
        SessionRunner(model, ExportMetadata(inputs=(info,), outputs=(info,)), RunRequest())
