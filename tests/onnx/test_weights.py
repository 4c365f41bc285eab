"""Weights of several graphs: written once, mapped once, and refused where they are not the export's."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from polyport import ExportedModel, OnnxConfig, OnnxExporter
from polyport.errors import ArtifactError
from polyport.metadata import ExportMetadata, TensorInfo
from polyport.pipeline import ExportedComponent
from polyport_onnx import weights
from polyport_onnx.artifact import SHARED, load_model, save_models

SIZE = 64 * 64 * 4


def _model(*arrays: np.ndarray | ir.TensorProtocol) -> ir.Model:
    """The sum of x and the weights `w0`, `w1`..."""
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=(64, 64))
    nodes, values, last = [], [], x
    for index, array in enumerate(arrays):
        tensor = ir.tensor(array, name=f"w{index}") if isinstance(array, np.ndarray) else array
        values.append(ir.val(f"w{index}", const_value=tensor))
        nodes.append(ir.node("Add", [last, values[-1]]))
        last = nodes[-1].outputs[0]
        last.name, last.dtype, last.shape = f"y{index}", ir.DataType.FLOAT, ir.Shape((64, 64))
    graph = ir.Graph([x], [last], nodes=nodes, initializers=values, opset_imports={"": 20}, name="g")
    return ir.Model(graph, ir_version=10)


def _array(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(64, 64)).astype(np.float32)


def _export(**models: ir.Model) -> ExportedModel:
    components = {}
    for name, model in models.items():
        last = model.graph.outputs[0].name
        metadata = ExportMetadata(
            inputs=(TensorInfo("x", "float32", (64, 64)),),
            outputs=(TensorInfo(str(last), "float32", (64, 64)),),
        )
        components[name] = ExportedComponent(program=model, metadata=metadata)
    return ExportedModel("onnx", components)


def _sum(export: ExportedModel, name: str) -> torch.Tensor:
    (found,) = export.caller(name).runner([torch.zeros(64, 64)])
    return found


def _data(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.name.endswith(".data"))


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Two components that share one weight of two."""
    shared = _array(0)
    export = _export(first=_model(shared, _array(1)), second=_model(shared.copy(), _array(2)))
    export.save_pretrained(tmp_path / "pair")
    return tmp_path / "pair"


# ── written ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_equal_weights_are_written_once(pair: Path) -> None:
    assert sorted(path.name for path in pair.iterdir()) == [
        "export.json", "first.onnx", "second.onnx", SHARED,
    ]  # fmt: skip
    assert _data(pair) == 3 * SIZE
    loaded = ExportedModel.from_pretrained(pair)
    for index, name in enumerate(("first", "second"), 1):
        expected = torch.from_numpy(_array(0) + _array(index))
        torch.testing.assert_close(_sum(loaded, name), expected)


def test_every_component_lists_what_it_needs(pair: Path, tmp_path: Path) -> None:
    entries = json.loads((pair / "export.json").read_text())["components"]
    for name, entry in entries.items():
        assert [file["name"] for file in entry["files"]] == [f"{name}.onnx", SHARED]
    _export(large=_model(_array(0)), small=_model(np.float32([1]))).save_pretrained(tmp_path / "out")
    entries = json.loads((tmp_path / "out" / "export.json").read_text())["components"]
    assert [file["name"] for file in entries["large"]["files"]] == ["large.onnx", SHARED]
    assert [file["name"] for file in entries["small"]["files"]] == ["small.onnx"]


def test_equal_weights_of_one_model(tmp_path: Path) -> None:
    models = {"model": _model(_array(0), _array(1), _array(0), _array(0).T.copy().T)}
    assert save_models(models, tmp_path) == {"model": ("model.onnx", "model.onnx.data")}
    assert _data(tmp_path) == 2 * SIZE
    loaded = _export(model=load_model([tmp_path / "model.onnx", tmp_path / "model.onnx.data"]))
    torch.testing.assert_close(_sum(loaded, "model"), torch.from_numpy(3 * _array(0) + _array(1)))


def test_what_is_alike_but_not_equal(tmp_path: Path) -> None:
    """Another type, another shape, and one element where no sample is taken."""
    almost = _array(0)
    almost.reshape(-1)[1001] += 1
    wide = _array(0).reshape(1, 64, 64)
    flags = _array(0).view(np.int32)
    models = {"a": _model(_array(0), almost), "b": _model(wide)}
    models["c"] = _model(ir.tensor(flags, name="w0"))
    save_models(models, tmp_path)
    assert _data(tmp_path) == 4 * SIZE
    for name, arrays in {"a": [_array(0), almost], "b": [wide], "c": [flags]}.items():
        loaded = load_model([tmp_path / f"{name}.onnx", tmp_path / SHARED])
        for index, array in enumerate(arrays):
            tensor = loaded.graph.initializers[f"w{index}"].const_value
            assert tensor is not None
            assert np.array_equal(tensor.numpy(), array)
            assert tensor.numpy().dtype == array.dtype


def test_weights_that_lie_in_one_memory_are_not_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter = torch.randn(64, 64)
    read: list[int] = []
    content = weights._content

    def counted(tensor: Any) -> memoryview:
        read.append(tensor.nbytes)
        return content(tensor)

    monkeypatch.setattr(weights, "_content", counted)
    tensors = [ir.tensor_adapters.TorchTensor(parameter, name="w0") for _ in range(3)]
    save_models({str(index): _model(tensor) for index, tensor in enumerate(tensors)}, tmp_path)
    assert _data(tmp_path) == SIZE
    assert len(read) == 2  # a sample, and to write


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.bool], ids=str)
def test_torch_weights_of_other_types_that_lie_crosswise(tmp_path: Path, dtype: torch.dtype) -> None:
    value = (torch.arange(64 * 64).reshape(64, 64) % 2).to(dtype)
    crosswise = ir.tensor_adapters.TorchTensor(value.T, name="w0")
    models = {
        "a": _model(crosswise),
        "b": _model(ir.tensor_adapters.TorchTensor(value.T.contiguous(), name="w0")),
    }
    save_models(models, tmp_path)
    assert _data(tmp_path) == value.numel() * value.element_size()
    loaded = load_model([tmp_path / "a.onnx", tmp_path / SHARED])
    tensor = loaded.graph.initializers["w0"].const_value
    assert tensor is not None
    assert tensor.numpy().astype(np.int64).tolist() == value.T.to(torch.int64).tolist()


def test_packed_weights(tmp_path: Path) -> None:
    packed, again = (
        ir.tensor(
            (np.arange(64 * 64).reshape(64, 64) % 8).astype(np.uint8), dtype=ir.DataType.UINT4, name="w0"
        )
        for _ in range(2)
    )
    save_models({"a": _model(packed), "b": _model(again)}, tmp_path)
    assert _data(tmp_path) == 64 * 64 // 2
    tensor = load_model([tmp_path / "a.onnx", tmp_path / SHARED]).graph.initializers["w0"].const_value
    assert tensor is not None
    assert np.array_equal(tensor.numpy().astype(int), packed.numpy().astype(int))


def test_large_weights_are_aligned(tmp_path: Path) -> None:
    large = [np.full((600, 600), value, np.float32) for value in (1, 2)]
    save_models({"a": _model(_array(0), large[0]), "b": _model(_array(1), large[1], large[0])}, tmp_path)
    for name in "ab":
        for tensor in onnx.load(tmp_path / f"{name}.onnx", load_external_data=False).graph.initializer:
            values = {entry.key: entry.value for entry in tensor.external_data}
            assert values["location"] == SHARED
            assert np.prod(tensor.dims) < 2**18 or int(values["offset"]) % 4096 == 0


def test_same_bytes_twice_and_again_from_loaded(pair: Path, tmp_path: Path) -> None:
    shared = _array(0)
    _export(first=_model(shared, _array(1)), second=_model(shared, _array(2))).save_pretrained(
        tmp_path / "again"
    )
    loaded = ExportedModel.from_pretrained(pair)
    loaded.save_pretrained(tmp_path / "third")
    loaded.save_pretrained(pair)
    for path in pair.iterdir():
        for other in ("again", "third"):
            assert (tmp_path / other / path.name).read_bytes() == path.read_bytes(), path.name


def test_one_component_of_several_is_saved_with_its_own_weights(pair: Path, tmp_path: Path) -> None:
    loaded = ExportedModel.from_pretrained(pair)
    save_models({"alone": loaded["second"].program}, tmp_path / "pair")
    assert (tmp_path / "pair" / "alone.onnx.data").stat().st_size == 2 * SIZE


def test_memory_while_saving(tmp_path: Path) -> None:
    """One tensor is held at most, and none where it lies in a row."""
    code = """
import resource, sys, numpy as np, onnx_ir as ir, onnx
from pathlib import Path
from polyport_onnx.artifact import save_models
rows = 4 * 2**20
def model(arrays):
    values = [ir.val(f"w{i}", const_value=ir.tensor(a, name=f"w{i}")) for i, a in enumerate(arrays)]
    return ir.Model(ir.Graph([], [], nodes=[], initializers=values, opset_imports={"": 20}, name="g"), ir_version=10)
arrays = [np.full(rows, i, np.float32) for i in range(8)]
models = {"a": model(arrays), "b": model([a.copy() for a in arrays[:4]])}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
save_models(models, Path(sys.argv[1]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 8 * 2**10
    assert _data(tmp_path) == 8 * 16 * 2**20


# ── real components ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def components(tiny_llama: Any, token_ids: Any) -> ExportedModel:
    """One model lowered twice: with and without a cache to be returned."""
    made = {
        name: OnnxExporter().export(
            tiny_llama, {**token_ids(2, 5), "use_cache": cached}, OnnxConfig(dynamic=True)
        )["model"]
        for name, cached in {"plain": False, "cached": True}.items()
    }
    return ExportedModel("onnx", made)


def test_a_models_components_share_their_weights(
    components: ExportedModel, tiny_llama: Any, token_ids: Any, tmp_path: Path
) -> None:
    components.save_pretrained(tmp_path / "out")
    parameters = sum(p.numel() * 4 for p in tiny_llama.parameters() if p.numel() * 4 > weights.INLINE)
    assert _data(tmp_path / "out") < 1.05 * parameters
    loaded = ExportedModel.from_pretrained(tmp_path / "out")
    inputs = token_ids(3, 7)
    with torch.no_grad():
        expected = tiny_llama(**inputs).logits
    for name in ("plain", "cached"):
        got = loaded.caller(name)({**inputs})
        torch.testing.assert_close(got.logits, expected, atol=1e-5, rtol=1e-5)
        onnx.checker.check_model(str(tmp_path / "out" / f"{name}.onnx"), full_check=True)


def test_components_run_before_they_are_saved(
    components: ExportedModel, tiny_llama: Any, token_ids: Any
) -> None:
    inputs = token_ids(1, 4)
    with torch.no_grad():
        expected = tiny_llama(**inputs).logits
    for name in ("plain", "cached"):
        torch.testing.assert_close(components.caller(name)({**inputs}).logits, expected, atol=1e-5, rtol=1e-5)


# ── mapped ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _mappings(file: Path) -> int:
    return sum(line.rstrip().endswith(str(file)) for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux what is mapped")
def test_a_file_is_mapped_once_and_let_go(pair: Path) -> None:
    loaded = [ExportedModel.from_pretrained(pair) for _ in range(2)]
    assert _mappings(pair / SHARED) == 1
    first, second = (
        loaded[index][name].program.graph.initializers["w0"].const_value.numpy()
        for index, name in ((0, "first"), (1, "second"))
    )
    assert np.shares_memory(first, second)
    loaded.pop()
    gc.collect()
    assert np.array_equal(first, _array(0))
    assert _mappings(pair / SHARED) == 1
    del loaded, first, second
    gc.collect()
    assert _mappings(pair / SHARED) == 0


def test_a_file_that_takes_its_place_is_another_one(pair: Path) -> None:
    before = ExportedModel.from_pretrained(pair)
    _export(first=_model(_array(5), _array(6)), second=_model(_array(5))).save_pretrained(pair)
    after = ExportedModel.from_pretrained(pair)
    torch.testing.assert_close(_sum(before, "first"), torch.from_numpy(_array(0) + _array(1)))
    torch.testing.assert_close(_sum(after, "first"), torch.from_numpy(_array(5) + _array(6)))
    torch.testing.assert_close(_sum(after, "second"), torch.from_numpy(_array(5)))


# ── refused ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _changed(folder: Path) -> None:
    with (folder / SHARED).open("r+b") as file:
        file.seek(SIZE)
        file.write(b"\1\2\3\4")


def _link(folder: Path) -> None:
    (folder.parent / "outside").mkdir()
    shutil.move(folder / SHARED, folder.parent / "outside" / "data")
    (folder / SHARED).symlink_to(folder.parent / "outside" / "data")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / SHARED).unlink(), f"lacks the file '{SHARED}'"),
        (lambda folder: os.truncate(folder / SHARED, 100), f"{SHARED} has 100 bytes"),
        (_changed, "SHA-256 sum differs"),
        (_link, "leads out of the export"),
    ],
    ids=["missing", "truncated", "changed", "elsewhere"],
)
def test_damaged_weights(pair: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(pair)
    with pytest.raises(ArtifactError, match=message):
        ExportedModel.from_pretrained(pair)


def test_weights_that_a_component_does_not_list(pair: Path) -> None:
    document = json.loads((pair / "export.json").read_text())
    document["components"]["second"]["files"].pop()
    (pair / "export.json").write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match="none of the export's files"):
        ExportedModel.from_pretrained(pair)


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "first.onnx", f"./{SHARED}"])
def test_weights_elsewhere(pair: Path, location: str) -> None:
    proto = onnx.load(pair / "second.onnx", load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    (pair / "second.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ArtifactError, match="none of the export's files"):
        load_model([pair / "second.onnx", pair / SHARED])
