"""Files: what is written, what may be moved, and what is refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from polyport import ExportedModel, OnnxConfig, OnnxExporter
from polyport.errors import ArtifactError, ConfigError
from polyport.metadata import ExportMetadata, TensorInfo
from polyport.pipeline import ExportedComponent
from polyport_onnx.artifact import load_model, save_models

ROWS = 64


def _model(value: np.ndarray | None = None) -> ir.Model:
    """Add a weight to x, with a weight that goes to the data file."""
    weight = np.arange(ROWS * 8, dtype=np.float32).reshape(ROWS, 8) if value is None else value
    tensor = ir.tensor(weight, name="weight")
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=weight.shape)
    w = ir.val("weight", const_value=tensor)
    node = ir.node("Add", [x, w])
    node.outputs[0].name = "y"
    node.outputs[0].dtype, node.outputs[0].shape = ir.DataType.FLOAT, ir.Shape(weight.shape)
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[w], opset_imports={"": 20}, name="g")
    return ir.Model(graph, ir_version=10)


def _export(model: ir.Model, rows: int = ROWS) -> ExportedModel:
    info = TensorInfo("x", "float32", (rows, 8))
    metadata = ExportMetadata(inputs=(info,), outputs=(TensorInfo("y", "float32", (rows, 8)),))
    return ExportedModel("onnx", {"model": ExportedComponent(program=model, metadata=metadata)})


def _sum(export: ExportedModel) -> float:
    return float(export(x=torch.zeros(ROWS, 8))["y"].double().sum())


EXPECTED = float(np.arange(ROWS * 8).sum())


# ── written ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_graph_and_weights_are_two_files(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == [
        "config.json",
        "export.json",
        "model.onnx",
        "model.onnx.data",
    ]
    proto = onnx.load(saved / "model.onnx", load_external_data=False)
    for tensor in proto.graph.initializer:
        size = int(np.prod(tensor.dims)) * ir.DataType(tensor.data_type).itemsize
        external = tensor.data_location == onnx.TensorProto.EXTERNAL
        assert external == (size > 1024), tensor.name
        if external:
            assert {entry.value for entry in tensor.external_data if entry.key == "location"} == {
                "model.onnx.data"
            }
    assert (saved / "model.onnx").stat().st_size < 64 * 1024


def test_checker_is_content(saved: Path) -> None:
    onnx.checker.check_model(str(saved / "model.onnx"), full_check=True)


def test_small_models_are_one_file(tmp_path: Path) -> None:
    small = _export(_model(np.ones((2, 8), dtype=np.float32)), rows=2)
    small.save_pretrained(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["export.json", "model.onnx"]
    loaded = ExportedModel.from_pretrained(tmp_path / "out")
    assert loaded(x=torch.zeros(2, 8))["y"].tolist() == [[1.0] * 8] * 2


def test_same_bytes_twice(exported: ExportedModel, saved: Path, tmp_path: Path) -> None:
    exported.save_pretrained(tmp_path / "again")
    for path in saved.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


def test_saving_leaves_the_model_in_memory(exported: ExportedModel, tmp_path: Path) -> None:
    values = exported.program.graph.initializers.values()
    before = [value.const_value for value in values]
    exported.save_pretrained(tmp_path / "out")
    assert all(value.const_value is old for value, old in zip(values, before, strict=True))


def test_nothing_of_this_machine(saved: Path) -> None:
    content = b"".join(path.read_bytes() for path in saved.iterdir())
    for path in (Path(torch.__file__).parent.parent, Path(__file__).parents[2], Path.home()):
        assert os.fsencode(path) not in content


def test_tied_weights_are_written_once(tiny_llama: Any, token_ids: Any, tmp_path: Path) -> None:
    """Token embedding and output head are one matrix."""
    export = OnnxExporter().export(
        tiny_llama, {**token_ids(2, 5), "use_cache": False}, OnnxConfig(dynamic=True)
    )
    export.save_pretrained(tmp_path / "out")
    parameters = sum(p.numel() * 4 for p in {id(p): p for p in tiny_llama.parameters()}.values())
    size = sum(file.stat().st_size for file in (tmp_path / "out").glob("model.onnx*"))
    table = tiny_llama.lm_head.weight
    assert table is tiny_llama.model.embed_tokens.weight
    assert size - (tmp_path / "out" / "model.onnx").stat().st_size < parameters + table.numel() * 4
    weights = [value.const_value.numpy() for value in export.program.graph.initializers.values()]
    copies = [
        w
        for w in weights
        if w.size == table.numel() and np.array_equal(np.sort(w, None), np.sort(table.detach(), None))
    ]
    assert len(copies) == 1


# ── moved ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_moved_and_renamed(tmp_path: Path) -> None:
    _export(_model()).save_pretrained(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")
    assert _sum(ExportedModel.from_pretrained(tmp_path / "two")) == EXPECTED


def test_from_another_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _export(_model()).save_pretrained("out")
    loaded = ExportedModel.from_pretrained("out")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    loaded.save_pretrained(tmp_path / "copy")
    assert _sum(ExportedModel.from_pretrained(tmp_path / "copy")) == EXPECTED


def test_saved_again_from_loaded(saved: Path, tmp_path: Path) -> None:
    ExportedModel.from_pretrained(saved).save_pretrained(tmp_path / "again")
    for name in ("model.onnx", "model.onnx.data"):
        assert (tmp_path / "again" / name).read_bytes() == (saved / name).read_bytes()


def test_saved_over_itself(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    _export(_model()).save_pretrained(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    loaded = ExportedModel.from_pretrained(folder)
    loaded.save_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert _sum(loaded) == EXPECTED
    loaded.save_pretrained(folder)
    assert _sum(ExportedModel.from_pretrained(folder)) == EXPECTED


def test_another_export_takes_its_place(tmp_path: Path) -> None:
    """One that is loaded stays what it was, whenever it is run or saved."""
    folder = tmp_path / "out"
    _export(_model()).save_pretrained(folder)
    loaded = ExportedModel.from_pretrained(folder)
    _export(_model(np.ones((ROWS, 8), dtype=np.float32))).save_pretrained(folder)
    assert _sum(loaded) == EXPECTED
    loaded.save_pretrained(tmp_path / "copy")
    assert _sum(ExportedModel.from_pretrained(tmp_path / "copy")) == EXPECTED
    assert _sum(ExportedModel.from_pretrained(folder)) == ROWS * 8


def test_folder_that_disappears_after_loading(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    _export(_model()).save_pretrained(folder)
    loaded = ExportedModel.from_pretrained(folder)
    shutil.rmtree(folder)
    assert _sum(loaded) == EXPECTED


def test_bare_program_under_another_name(tmp_path: Path) -> None:
    _export(_model()).save(tmp_path / "add.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["add.onnx", "add.onnx.data"]
    session = ort.InferenceSession(str(tmp_path / "add.onnx"))
    (result,) = session.run(None, {"x": np.zeros((ROWS, 8), np.float32)})
    assert float(result.sum()) == EXPECTED
    small = _export(_model(np.ones((2, 8), dtype=np.float32)), rows=2)
    small.save(tmp_path / "add.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["add.onnx"]  # no stale weights


@pytest.mark.parametrize("subfolder", ["", "onnx"])
def test_layout_of_the_hubs_cache(tmp_path: Path, subfolder: str) -> None:
    """Every file a link into `blobs`; saved again and run from there."""
    _export(_model()).save_pretrained(tmp_path / "plain")
    repo = tmp_path / "models--me--it"
    snapshot = repo / "snapshots" / "c0ffee" / subfolder
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for index, path in enumerate(sorted((tmp_path / "plain").iterdir())):
        shutil.copy(path, repo / "blobs" / str(index))
        (snapshot / path.name).symlink_to(os.path.relpath(repo / "blobs" / str(index), snapshot))
    loaded = ExportedModel.from_pretrained(repo / "snapshots" / "c0ffee", subfolder=subfolder)
    assert _sum(loaded) == EXPECTED
    loaded.save_pretrained(tmp_path / "copy")
    assert _sum(ExportedModel.from_pretrained(tmp_path / "copy")) == EXPECTED


def test_read_only_folder(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    _export(_model()).save_pretrained(folder)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())
    folder.chmod(0o555)
    try:
        assert _sum(ExportedModel.from_pretrained(folder)) == EXPECTED
    finally:
        folder.chmod(0o755)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir()) == before


@pytest.mark.parametrize(
    "dtype", [ir.DataType.BFLOAT16, ir.DataType.FLOAT16, ir.DataType.INT8, ir.DataType.BOOL]
)
def test_weights_of_other_types(tmp_path: Path, dtype: ir.DataType) -> None:
    value = np.arange(4096).reshape(64, 64) % 2
    model = _model()
    model.graph.initializers["weight"].const_value = ir.Tensor(
        value.astype(dtype.numpy()), dtype=dtype, name="weight"
    )
    names = save_models({"model": model}, tmp_path)["model"]
    loaded = load_model([tmp_path / name for name in names])
    tensor = loaded.graph.initializers["weight"].const_value
    assert tensor is not None
    assert tensor.dtype == dtype
    assert tensor.numpy().astype(np.int64).tolist() == value.tolist()


# ── refused ─────────────────────────────────────────────────────────────────────────────────────────────────────────

Change = Callable[[onnx.ModelProto], None]


def _entry(key: str, value: str, *, more: bool = False) -> Change:
    def change(proto: onnx.ModelProto) -> None:
        (tensor,) = proto.graph.initializer
        if more:
            tensor.external_data.add(key=key, value=value)
            return
        for entry in tensor.external_data:
            if entry.key == key:
                entry.value = value

    return change


def _dims(*dims: int) -> Change:
    def change(proto: onnx.ModelProto) -> None:
        del proto.graph.initializer[0].dims[:]
        proto.graph.initializer[0].dims.extend(dims)

    return change


def _external(name: str = "other") -> onnx.TensorProto:
    tensor = onnx.TensorProto(name=name, data_type=onnx.TensorProto.FLOAT, dims=[1])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="secret")
    return tensor


def _attribute(proto: onnx.ModelProto) -> None:
    node = onnx.helper.make_node("Constant", [], ["c"])
    node.attribute.append(onnx.AttributeProto(name="value", type=onnx.AttributeProto.TENSOR, t=_external()))
    proto.graph.node.append(node)


def _subgraph(proto: onnx.ModelProto) -> None:
    graph = onnx.GraphProto(name="inner", initializer=[_external()])
    node = onnx.helper.make_node("If", ["c"], ["d"])
    node.attribute.append(onnx.AttributeProto(name="then_branch", type=onnx.AttributeProto.GRAPH, g=graph))
    proto.graph.node.append(node)


def _function(proto: onnx.ModelProto) -> None:
    node = onnx.helper.make_node("Constant", [], ["c"])
    node.attribute.append(onnx.AttributeProto(name="value", type=onnx.AttributeProto.TENSOR, t=_external()))
    proto.functions.append(onnx.FunctionProto(name="f", domain="d", node=[node], output=["c"]))


def _sparse(proto: onnx.ModelProto) -> None:
    proto.graph.sparse_initializer.append(onnx.SparseTensorProto(values=_external(), dims=[1]))


def _training(proto: onnx.ModelProto) -> None:
    proto.training_info.append(
        onnx.TrainingInfoProto(initialization=onnx.GraphProto(initializer=[_external()]))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_entry("location", "../secret"), r"in '\.\./secret', which is none of the export's files"),
        (_entry("location", "/etc/passwd"), "none of the export's files"),
        (_entry("location", "secret"), "none of the export's files"),
        (_entry("location", "model.onnx"), "none of the export's files"),
        (_entry("location", "./model.onnx.data"), "none of the export's files"),
        (_entry("location", "*/_ORT_MEM_ADDR_/*"), "none of the export's files"),
        (_entry("location", ""), "none of the export's files"),
        (_entry("location", "../secret", more=True), "none of the export's files"),
        (_entry("location", "model.onnx.data", more=True), "none of the export's files"),
        (_entry("offset", "1000000"), "outside 'model.onnx.data'"),
        (_entry("offset", "4"), "outside 'model.onnx.data'"),
        (_entry("offset", "-4096"), "outside 'model.onnx.data'"),
        (_entry("offset", "four"), "describes the weight 'weight' wrongly"),
        (_entry("length", "1000000"), "outside 'model.onnx.data'"),
        (_entry("length", "-1"), "outside 'model.onnx.data'"),
        (_entry("length", "4"), "outside 'model.onnx.data'"),
        (_dims(1 << 40, 8), "outside 'model.onnx.data'"),
        (_dims(-1, 8), "outside 'model.onnx.data'"),
        (_attribute, "none of the export's files"),
        (_subgraph, "none of the export's files"),
        (_function, "none of the export's files"),
        (_sparse, "none of the export's files"),
        (_training, "none of the export's files"),
    ],
)
def test_weights_elsewhere(tmp_path: Path, change: Change, message: str) -> None:
    save_models({"model": _model()}, tmp_path)
    (tmp_path / "secret").write_bytes(b"\0" * 4096)
    proto = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    change(proto)
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ArtifactError, match=message):
        load_model([tmp_path / "model.onnx", tmp_path / "model.onnx.data"])


def test_file_of_another_export(tmp_path: Path) -> None:
    """Listed files only, however harmless the others look."""
    save_models({"model": _model()}, tmp_path)
    with pytest.raises(ArtifactError, match="none of the export's files"):
        load_model([tmp_path / "model.onnx"])


def test_compiled_programs_need_trust(tmp_path: Path) -> None:
    save_models({"model": _model()}, tmp_path)
    proto = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    proto.graph.node.append(
        onnx.helper.make_node("EPContext", [], ["z"], domain="com.microsoft", ep_cache_context="x.bin")
    )
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    files = [tmp_path / "model.onnx", tmp_path / "model.onnx.data"]
    with pytest.raises(ArtifactError, match=r"compiled for a provider.*trust_remote_code=True"):
        load_model(files)
    load_model(files, trust=True)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x08\x0a\xff\xff\xff\xff", b"PK\x03\x04"])
def test_not_a_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"model\.onnx"):
        load_model([tmp_path / "model.onnx"])


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data"])
def test_truncated_export(saved: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(saved, tmp_path / "export")
    os.truncate(tmp_path / "export" / name, 2000)
    with pytest.raises(ArtifactError, match=rf"{name} has 2000 bytes"):
        ExportedModel.from_pretrained(tmp_path / "export")


# ── size ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "large"
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.slow
def test_more_than_two_gigabytes(large: Path) -> None:
    """A protobuf ends at 2 GB; the weights go beside it, and are mapped again."""
    rows = 2_200_000_000 // (8 * 4)
    weight = np.zeros((rows, 8), dtype=np.float32)
    weight[-1, -1] = 7
    _export(_model(weight), rows=rows).save_pretrained(large)
    assert (large / "model.onnx.data").stat().st_size > 2**31
    loaded = ExportedModel.from_pretrained(large)
    tensor = loaded.program.graph.initializers["weight"].const_value
    assert tensor.numpy()[-1, -1] == 7
    del weight
    x = torch.zeros(rows, 8)
    assert float(loaded(x=x)["y"][-1, -1]) == 7


# ── opset ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_opset_is_the_one_asked_for(tiny_bert: Any, token_ids: Any, exported: ExportedModel) -> None:
    inputs = token_ids(2, 5)
    with torch.no_grad():
        expected = tiny_bert(**inputs).last_hidden_state
    for version in (18, 21):
        export = OnnxExporter().export(
            tiny_bert, token_ids(1, 5), OnnxConfig(dynamic=True, opset_version=version)
        )
        assert export.program.opset_imports[""] == version
        torch.testing.assert_close(export(**inputs).last_hidden_state, expected, atol=1e-5, rtol=0)
    assert exported.program.opset_imports[""] >= 18


@pytest.mark.parametrize("version", [7, 0, -1, 99])
def test_opset_that_is_not_supported(tiny_bert: Any, token_ids: Any, version: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"opset_version {version} is not supported: choose one from \d+ to \d+"
    ):
        OnnxExporter().export(tiny_bert, token_ids(1, 5), OnnxConfig(opset_version=version))


def test_opset_that_is_no_number() -> None:
    with pytest.raises(ConfigError, match="opset_version"):
        OnnxConfig.from_dict({"opset_version": "18"})
    with pytest.raises(ConfigError, match="opset_version"):
        OnnxConfig.from_dict({"opset_version": True})
