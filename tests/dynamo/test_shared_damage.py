"""Several components and their common weights: what is missing, damaged or made up is refused with one clear error."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from polyport.errors import ArtifactError
from polyport_dynamo.archive import load_program, save_programs
from polyport_dynamo.shared import MAPPING, WEIGHTS_FILE


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
        self.register_buffer("left", self.weight.detach()[:, :2])
        self.register_buffer("bias", torch.ones(3))
        self.register_buffer("index", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.t() + self.bias)[..., self.index] + self.left.sum()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = Model().eval()
    programs = {
        name: torch.export.export(model, (torch.ones(size, 4),)) for name, size in (("a", 1), ("b", 2))
    }
    save_programs(programs, tmp_path)
    return tmp_path


def _load(folder: Path, *, trust: bool = False) -> torch.export.ExportedProgram:
    return load_program(folder / "a.pt2", trust=trust, beside=[folder / WEIGHTS_FILE])


def _rewrite(folder: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    path = folder / "a.pt2"
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    change(entries)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def _remap(folder: Path, change: Callable[[Any], Any]) -> None:
    def apply(entries: dict[str, bytes]) -> None:
        document = json.loads(entries[f"a/extra/{MAPPING}"])
        replaced = change(document)
        entries[f"a/extra/{MAPPING}"] = json.dumps(document if replaced is None else replaced).encode()

    _rewrite(folder, apply)


def _restore(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS_FILE).items()}
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)


def test_it_loads_before_it_is_damaged(folder: Path) -> None:
    _remap(folder, lambda document: None)
    _restore(folder, lambda tensors: None)
    expected = Model()(torch.ones(1, 4))
    assert torch.equal(_load(folder).module()(torch.ones(1, 4)), expected)
    assert set(load_file(folder / WEIGHTS_FILE)) == {"weight", "bias", "index"}


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: [], "list of its weights can't be read"),
        (lambda d: {}, "list of its weights can't be read"),
        (lambda d: {"version": 1, "file": WEIGHTS_FILE, "weights": [1]}, "list of its weights can't be read"),
        (lambda d: d.update(version=2), "has the version 2"),
        (lambda d: d.update(file="other.safetensors"), "in 'other.safetensors', which is none of its files"),
        (lambda d: d.update(file=None), "which is none of its files"),
        (lambda d: d["weights"].pop("bias"), "'bias' is missing, where the graph takes torch.float32"),
        (lambda d: d["weights"].update(other={"key": "bias"}), "'other' has no empty place"),
        (lambda d: d["weights"].update(bias={"key": "nothing"}), "lacks 'nothing'"),
        (lambda d: d["weights"].update(bias="bias"), "the place of 'bias' is given as 'bias'"),
        (lambda d: d["weights"].update(bias={"key": 3}), "the place of 'bias' is given as"),
        (lambda d: d["weights"].update(bias={"key": "index"}), "'bias' is torch.int64"),
        (lambda d: d["weights"].update(bias={"key": "weight"}), r"'bias' is torch.float32 \[12\]"),
        (lambda d: d["weights"].update(index={"key": "index", "shape": [3], "stride": [0, 1], "offset": 0}), "reach"),
        (lambda d: d["weights"]["left"].update(offset=100), "'left' reaches out of 'weight'"),
        (lambda d: d["weights"]["left"].update(offset=-1), "'left' reaches out of 'weight'"),
        (lambda d: d["weights"]["left"].update(offset=3), "'left' reaches out of 'weight'"),
        (lambda d: d["weights"]["left"].update(stride=[-4, 1]), "'left' reaches out of 'weight'"),
        (lambda d: d["weights"]["left"].update(stride=[1 << 62, 1]), "'left' reaches out of 'weight'"),
        (lambda d: d["weights"]["left"].update(stride=[4.0, 1]), "'left' reaches out of 'weight'"),
        (lambda d: d["weights"]["left"].update(stride=None), "'left' reaches out of 'weight'"),
        (lambda d: d["weights"]["left"].update(shape=[3, 1]), r"'left' is torch.float32 \[3, 1\]"),
        (lambda d: d["weights"]["left"].update(shape=[0, 2]), "'left' reaches out of 'weight'"),
        (lambda d: d["weights"]["left"].update(shape="3"), "'left' reaches out of 'weight'"),
    ],
)  # fmt: skip
def test_list_of_weights(folder: Path, change: Callable[[Any], Any], message: str, trust: bool) -> None:
    def apply(document: Any) -> Any:
        replaced = change(document)
        return (
            replaced
            if "version" not in document or isinstance(replaced, list) or _is_whole(replaced)
            else None
        )

    _remap(folder, apply)
    with pytest.raises(ArtifactError, match=message) as caught:
        _load(folder, trust=trust)
    assert str(caught.value).startswith(str(folder / "a.pt2"))


def _is_whole(value: Any) -> bool:
    return isinstance(value, dict) and (not value or "weights" in value)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b"[" * 100_000, b"null", b"3"])
def test_list_that_is_none(folder: Path, content: bytes) -> None:
    _rewrite(folder, lambda entries: entries.update({f"a/extra/{MAPPING}": content}))
    with pytest.raises(ArtifactError, match=r"a\.pt2"):
        _load(folder)


@pytest.mark.parametrize("content", [b"", None])
def test_no_list(folder: Path, content: bytes | None) -> None:
    """The program itself says what it takes, so it isn't loaded with empty weights."""

    def change(entries: dict[str, bytes]) -> None:
        entries.pop(f"a/extra/{MAPPING}")
        if content is not None:
            entries[f"a/extra/{MAPPING}"] = content

    _rewrite(folder, change)
    with pytest.raises(ArtifactError, match=r"a\.pt2.*'(weight|left|bias|index)' is"):
        _load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("bias"), "lacks 'bias'"),
        (lambda t: t.update(bias=t["bias"].half()), "'bias' is torch.float16"),
        (lambda t: t.update(bias=torch.ones(4)), r"'bias' is torch.float32 \[4\], where the graph takes torch.float32 \[3\]"),
        (lambda t: t.update(bias=torch.ones(3, 1)), r"'bias' is torch.float32 \[3, 1\]"),
        (lambda t: t.update(weight=torch.ones(11)), "reaches out of 'weight'"),
        (lambda t: t.update(weight=torch.ones(3, 4)), "reaches out of 'weight'"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(folder: Path, change: Callable[[Any], Any], message: str) -> None:
    _restore(folder, change)
    with pytest.raises(ArtifactError, match=message):
        _load(folder)


@pytest.mark.parametrize("size", [0, 4, 50, -1])
def test_truncated(folder: Path, size: int) -> None:
    path = folder / WEIGHTS_FILE
    content = path.read_bytes()[:size]
    path.unlink()
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"weights\.safetensors can't be read"):
        _load(folder)


@pytest.mark.parametrize(
    "header",
    [
        {"bias": {"dtype": "F32", "shape": [3], "data_offsets": [0, 1 << 40]}},
        {"bias": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 12]}},
        {"bias": {"dtype": "NO", "shape": [3], "data_offsets": [0, 12]}},
        {"bias": {"dtype": "F32", "shape": [-3], "data_offsets": [0, 12]}},
    ],
)
def test_made_up_header(folder: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    (folder / WEIGHTS_FILE).unlink()
    (folder / WEIGHTS_FILE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    with pytest.raises(ArtifactError, match=r"weights\.safetensors can't be read"):
        _load(folder)


def test_missing_file(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(ArtifactError, match=r"weights\.safetensors"):
        _load(folder)
    with pytest.raises(ArtifactError, match=r"in 'weights\.safetensors', which is none of its files"):
        load_program(folder / "a.pt2", trust=False)


def test_a_list_names_no_path(folder: Path, tmp_path: Path) -> None:
    """Only files that the export's manifest lists, and core has checked, are opened."""
    shutil.copy(folder / WEIGHTS_FILE, tmp_path / "secret.safetensors")
    for name in (str(tmp_path / "secret.safetensors"), "../secret.safetensors", "./weights.safetensors"):
        _remap(folder, lambda document, name=name: document.update(file=name))
        with pytest.raises(ArtifactError, match="none of its files"):
            _load(folder)


def test_a_weight_that_is_there_is_not_replaced(folder: Path) -> None:
    """An archive of another tool that has all its weights, and a list that names one of them."""
    program = torch.export.export(Model().eval(), (torch.ones(1, 4),))
    (folder / "whole").mkdir()
    save_programs({"a": program}, folder / "whole")
    shutil.copy(folder / WEIGHTS_FILE, folder / "whole")

    def add(entries: dict[str, bytes]) -> None:
        text = json.dumps({"version": 1, "file": WEIGHTS_FILE, "weights": {"bias": {"key": "bias"}}})
        entries[f"a/extra/{MAPPING}"] = text.encode()

    _rewrite(folder / "whole", add)
    with pytest.raises(ArtifactError, match="'bias' has no empty place"):
        _load(folder / "whole")
