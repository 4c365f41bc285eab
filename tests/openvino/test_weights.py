"""Weights of several graphs: written once, mapped, and refused where they are not the export's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as opset
import pytest
import torch
from openvino_graphs import export, graph, infos, sums

from polyport import ExportedModel
from polyport.errors import ArtifactError
from polyport_openvino import OpenVINOConfig, OpenVINOExporter
from polyport_openvino.artifact import SHARED, load_model, save_models

SIZE = 64 * 64 * 4


def _array(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(64, 64)).astype(np.float32)


def _sum(exported: ExportedModel, name: str) -> torch.Tensor:
    (found,) = exported.caller(name).runner([torch.zeros(64, 64)])
    return found


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Two components that share one weight of two."""
    made = export(first=sums(_array(0), _array(1)), second=sums(_array(0), _array(2)))
    made.save_pretrained(tmp_path / "pair")
    return tmp_path / "pair"


def test_equal_weights_are_written_once(pair: Path) -> None:
    assert sorted(path.name for path in pair.iterdir()) == [
        "export.json", "openvino_first.xml", "openvino_second.xml", SHARED,
    ]  # fmt: skip
    assert (pair / SHARED).stat().st_size == 3 * SIZE
    loaded = ExportedModel.from_pretrained(pair)
    for index, name in enumerate(("first", "second"), 1):
        expected = torch.from_numpy(_array(0) + _array(index))
        torch.testing.assert_close(_sum(loaded, name), expected, atol=1e-6, rtol=0)


def test_every_component_lists_what_it_needs(pair: Path) -> None:
    entries = json.loads((pair / "export.json").read_text())["components"]
    for name, entry in entries.items():
        assert [file["name"] for file in entry["files"]] == [f"openvino_{name}.xml", SHARED]


def test_what_is_alike_but_not_equal(tmp_path: Path) -> None:
    """One element of a weight is another, and one weight has another shape."""
    almost = _array(0)
    almost[17, 33] += 1

    def wide(x: Any) -> Any:
        weight = opset.reshape(opset.constant(_array(0).reshape(-1)), opset.constant([64, 64]), False)
        return opset.add(x, weight)

    models = {"a": sums(_array(0), almost), "b": graph(infos(x=("float32", 64, 64)), ["y"], wide)}
    export(**models).save_pretrained(tmp_path / "out")
    assert 2 * SIZE <= (tmp_path / "out" / SHARED).stat().st_size < 2 * SIZE + 256
    loaded = ExportedModel.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(_sum(loaded, "a"), torch.from_numpy(_array(0) + almost), atol=1e-6, rtol=0)
    torch.testing.assert_close(_sum(loaded, "b"), torch.from_numpy(_array(0)), atol=0, rtol=0)


def test_weights_are_aligned(tmp_path: Path) -> None:
    def uneven(x: Any) -> Any:
        flag = opset.convert(opset.constant(np.array([True, False, True])), "f32")
        x = opset.add(x, opset.reduce_sum(flag, opset.constant([0])))
        return opset.add(x, opset.constant(np.full((600, 600), 2, np.float32)))

    inputs = infos(x=("float32", 600, 600))
    models = {"a": graph(inputs, ["y"], uneven), "b": graph(inputs, ["y"], uneven)}
    save_models(models, tmp_path)
    for name in models:
        text = (tmp_path / f"openvino_{name}.xml").read_text()
        for offset, size in re.findall(r'offset="(\d+)" size="(\d+)"', text):
            assert int(offset) % (4096 if int(size) > 2**20 else 64) == 0
        model = load_model([tmp_path / f"openvino_{name}.xml", tmp_path / SHARED])
        got = export(model=model, shape=(600, 600))(x=torch.zeros(600, 600))["y"]
        assert float(got.min()) == float(got.max()) == 4


@pytest.mark.parametrize(
    "kind", [ov.Type.bf16, ov.Type.f16, ov.Type.i8, ov.Type.u4, ov.Type.boolean], ids=str
)
def test_weights_of_other_types(tmp_path: Path, kind: ov.Type) -> None:
    value = (np.arange(64 * 64).reshape(64, 64) % 2).astype(np.float32)

    def make(x: Any) -> Any:
        return opset.add(x, opset.convert(opset.constant(value, kind), "f32"))

    inputs = infos(x=("float32", 64, 64))
    export(a=graph(inputs, ["y"], make), b=graph(inputs, ["y"], make)).save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / SHARED).stat().st_size == 64 * 64 * kind.bitwidth // 8
    loaded = ExportedModel.from_pretrained(tmp_path / "out")
    for name in "ab":
        assert torch.equal(_sum(loaded, name), torch.from_numpy(value))


def test_same_bytes_twice_and_again_from_loaded(pair: Path, tmp_path: Path) -> None:
    made = export(first=sums(_array(0), _array(1)), second=sums(_array(0), _array(2)))
    made.save_pretrained(tmp_path / "again")
    loaded = ExportedModel.from_pretrained(pair)
    loaded.save_pretrained(tmp_path / "third")
    loaded.save_pretrained(pair)
    for path in pair.iterdir():
        for other in ("again", "third"):
            assert (tmp_path / other / path.name).read_bytes() == path.read_bytes(), path.name


def test_one_component_of_several_is_saved_with_its_own_weights(pair: Path, tmp_path: Path) -> None:
    loaded = ExportedModel.from_pretrained(pair)
    save_models({"alone": loaded["second"].program}, tmp_path)
    assert (tmp_path / "openvino_alone.bin").stat().st_size == 2 * SIZE


def test_another_export_takes_its_place(pair: Path) -> None:
    before = ExportedModel.from_pretrained(pair)
    export(first=sums(_array(5), _array(6)), second=sums(_array(5))).save_pretrained(pair)
    after = ExportedModel.from_pretrained(pair)
    expected = {id(before): _array(0) + _array(1), id(after): _array(5) + _array(6)}
    for loaded in (before, after):
        torch.testing.assert_close(
            _sum(loaded, "first"), torch.from_numpy(expected[id(loaded)]), atol=1e-6, rtol=0
        )


_MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np, openvino as ov, openvino.opset15 as opset
from polyport_openvino.artifact import load_model, save_models

def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) // 1024

def model(arrays):
    x = opset.parameter([1], np.float32)
    node = x
    for array in arrays:
        node = opset.add(node, opset.reduce_sum(opset.constant(array, shared_memory=True), opset.constant([0]), True))
    return ov.Model([opset.result(node)], [x], "m")

arrays = [np.full(4 * 2**20, i, np.float32) for i in range(8)]
models = {"a": model(arrays), "b": model(arrays[:4])}
before = resident("RssAnon")
peaks = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
files = save_models(models, Path(sys.argv[1]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024 - peaks)
before = resident("RssAnon")
loaded = [load_model([Path(sys.argv[1], name) for name in names]) for names in files.values()]
print(resident("RssAnon") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux how much memory is in use")
def test_memory_while_saving_and_loading(tmp_path: Path) -> None:
    """Of 192 MB of weights a few are held at a time while they are saved, and none when they are loaded."""
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    saving, loading = map(int, done.stdout.split())
    assert saving < 64
    assert loading < 16
    assert (tmp_path / SHARED).stat().st_size < 8 * 16 * 2**20 + 2**16


# ── real components ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def components(tiny_llama: Any, token_ids: Any) -> ExportedModel:
    """One model lowered twice: with and without a cache to be returned."""
    made = {
        name: OpenVINOExporter().export(
            tiny_llama, {**token_ids(2, 5), "use_cache": cached}, OpenVINOConfig(dynamic=True)
        )["model"]
        for name, cached in {"plain": False, "cached": True}.items()
    }
    return ExportedModel("openvino", made)


def test_a_models_components_share_their_weights(
    components: ExportedModel, tiny_llama: Any, token_ids: Any, tmp_path: Path
) -> None:
    components.save_pretrained(tmp_path / "out")
    parameters = sum(p.numel() * 4 for p in tiny_llama.parameters())
    assert (tmp_path / "out" / SHARED).stat().st_size < 1.1 * parameters
    loaded = ExportedModel.from_pretrained(tmp_path / "out")
    inputs = token_ids(3, 7)
    with torch.no_grad():
        expected = tiny_llama(**inputs).logits
    for source in (components, loaded):
        for name in ("plain", "cached"):
            got = source.caller(name)({**inputs})
            torch.testing.assert_close(got.logits, expected, atol=1e-5, rtol=1e-5)


# ── refused ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _changed(folder: Path) -> None:
    with (folder / SHARED).open("r+b") as file:
        file.seek(SIZE)
        file.write(b"\1\2\3\4")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / SHARED).unlink(), f"lacks the file '{SHARED}'"),
        (lambda folder: os.truncate(folder / SHARED, 100), f"{SHARED} has 100 bytes"),
        (_changed, "SHA-256 sum differs"),
    ],
    ids=["missing", "truncated", "changed"],
)
def test_damaged_weights(pair: Path, damage: Any, message: str) -> None:
    damage(pair)
    with pytest.raises(ArtifactError, match=message):
        ExportedModel.from_pretrained(pair)


def test_weights_that_a_component_does_not_list(pair: Path) -> None:
    document = json.loads((pair / "export.json").read_text())
    document["components"]["second"]["files"].pop()
    (pair / "export.json").write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match="outside its file of weights"):
        ExportedModel.from_pretrained(pair)
