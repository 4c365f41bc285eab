from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from polyport.errors import ArtifactError
from polyport.manifest import ComponentRecord, FileRecord, Manifest, checked_file, is_plain_name, record_file
from polyport.metadata import ExportMetadata

RECORD = {"name": "model.toy", "size": 3, "sha256": "0" * 64}


def _document(**changes: Any) -> dict[str, Any]:
    component = {"file": "model.toy", "files": [RECORD], "metadata": {}}
    return {"schema_version": 1, "export_format": "toy", "components": {"model": component}, **changes}


def _read(folder: Path, document: Any) -> Manifest:
    path = folder / "export.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return Manifest.read(path)


def test_round_trip(tmp_path: Path) -> None:
    files = (FileRecord("a.toy", 3, "0" * 64), FileRecord("shared.data", 5, "1" * 64))
    manifest = Manifest(
        "toy",
        {
            "a": ComponentRecord(files, ExportMetadata(architecture="A")),
            "b": ComponentRecord(files[1:], ExportMetadata()),
        },
    )
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path / "export.json") == manifest
    assert manifest.file_names() == ["a.toy", "shared.data"]


def test_same_manifest_same_bytes(tmp_path: Path) -> None:
    manifest = Manifest("toy", {"model": ComponentRecord((FileRecord("a"),), ExportMetadata())})
    manifest.write(tmp_path)
    first = (tmp_path / "export.json").read_bytes()
    manifest.write(tmp_path)
    assert (tmp_path / "export.json").read_bytes() == first


def test_of_another_tool(tmp_path: Path) -> None:
    """Only the program file, no sizes: everything else has to be found."""
    manifest = _read(tmp_path, _document(components={"model": {"file": "model.toy", "metadata": {}}}))
    assert manifest.components["model"].files == (FileRecord("model.toy"),)
    assert not manifest.complete


@pytest.mark.parametrize("version", [2, 0, -1, "1", 1.0, True, None])
def test_schema_version(tmp_path: Path, version: Any) -> None:
    with pytest.raises(ArtifactError, match="schema version"):
        _read(tmp_path, _document(schema_version=version))


@pytest.mark.parametrize(
    "document",
    [
        "",
        "{",
        "\x00",
        "[]",
        "null",
        "[" * 100_000,
        {"export_format": "toy"},
        _document(export_format=3),
        _document(components={}),
        _document(components=[]),
        _document(components={"model": None}),
        _document(components={"model": {"files": [], "metadata": {}}}),
        _document(components={"model": {"files": "model.toy", "metadata": {}}}),
        _document(components={"model": {"files": ["model.toy"], "metadata": {}}}),
        _document(components={"model": {"files": [{"size": 3}], "metadata": {}}}),
        _document(components={"model": {"files": [{"name": 3}], "metadata": {}}}),
        _document(components={"model": {"files": [{"name": "a", "size": "3"}], "metadata": {}}}),
        _document(components={"model": {"files": [RECORD], "metadata": []}}),
        _document(components={"model": {"metadata": {}}}),
        _document(components={"../model": {"files": [RECORD], "metadata": {}}}),
        _document(components={"": {"files": [RECORD], "metadata": {}}}),
    ],
)
def test_damaged(tmp_path: Path, document: Any) -> None:
    with pytest.raises(ArtifactError):
        _read(tmp_path, document)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "a/b",
        "a\\b",
        "..",
        ".",
        "",
        ".hidden",
        "a\nb",
        "x" * 300,
        "nul\x00",
        "a b",
        "~",
    ],
)
def test_file_names_are_plain(tmp_path: Path, name: str) -> None:
    assert not is_plain_name(name)
    with pytest.raises(ArtifactError, match=r"plain names|wrongly"):
        _read(tmp_path, _document(components={"model": {"files": [{"name": name}], "metadata": {}}}))
    with pytest.raises(ArtifactError, match=r"plain names|wrongly"):
        _read(tmp_path, _document(components={"model": {"file": name, "metadata": {}}}))


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"holds no export: there is no export.json.*subfolder"):
        Manifest.read(tmp_path / "export.json")


def test_a_folder_or_a_pipe_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "export.json").mkdir()
    with pytest.raises(ArtifactError, match="is no file"):
        Manifest.read(tmp_path / "export.json")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArtifactError, match="is no file"):
        Manifest.read(tmp_path / "pipe")


def test_too_large(tmp_path: Path) -> None:
    path = tmp_path / "export.json"
    with path.open("wb") as stream:
        stream.truncate(65 * 2**20)  # sparse
    with pytest.raises(ArtifactError, match="larger than any manifest"):
        Manifest.read(path)


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export = tmp_path / "export"
    export.mkdir()
    (export / "a.toy").write_bytes(b"abc")
    return export


def test_file_is_the_one_that_was_saved(folder: Path) -> None:
    assert checked_file(folder, record_file(folder / "a.toy")) == folder / "a.toy"


def test_missing_file(folder: Path) -> None:
    with pytest.raises(ArtifactError, match=r"lacks the file 'b\.toy'"):
        checked_file(folder, FileRecord("b.toy"))


def test_truncated_file(folder: Path) -> None:
    record = record_file(folder / "a.toy")
    (folder / "a.toy").write_bytes(b"ab")
    with pytest.raises(ArtifactError, match="has 2 bytes where 3 were saved"):
        checked_file(folder, record)


def test_changed_file(folder: Path) -> None:
    record = record_file(folder / "a.toy")
    (folder / "a.toy").write_bytes(b"abd")
    with pytest.raises(ArtifactError, match="SHA-256"):
        checked_file(folder, record)


def test_link_out_of_the_export(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"xyz")
    (folder / "link.toy").symlink_to(tmp_path / "secret")
    with pytest.raises(ArtifactError, match="leads out of the export"):
        checked_file(folder, FileRecord("link.toy"))


def test_link_within_the_export(folder: Path) -> None:
    (folder / "link.toy").symlink_to("a.toy")
    checked_file(folder, FileRecord("link.toy", 3))


def test_links_in_a_circle(folder: Path) -> None:
    (folder / "one").symlink_to("two")
    (folder / "two").symlink_to("one")
    with pytest.raises(ArtifactError, match=r"can't be followed|lacks the file"):
        checked_file(folder, FileRecord("one"))


@pytest.mark.parametrize("subfolder", ["", "onnx/small"])
def test_layout_of_the_hubs_cache(tmp_path: Path, subfolder: str) -> None:
    """Files there are links from `snapshots/<commit>` to `blobs`."""
    repo = tmp_path / "models--me--it"
    snapshot = repo / "snapshots" / "abc123" / subfolder
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "blobs" / "feed").write_bytes(b"abc")
    (repo / "secret").write_bytes(b"abc")
    (snapshot / "a.toy").symlink_to(os.path.relpath(repo / "blobs" / "feed", snapshot))
    (snapshot / "b.toy").symlink_to(repo / "secret")
    checked_file(snapshot, FileRecord("a.toy", 3))
    with pytest.raises(ArtifactError, match="leads out of the export"):
        checked_file(snapshot, FileRecord("b.toy", 3))


def test_export_behind_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(folder)
    checked_file(tmp_path / "alias", FileRecord("a.toy", 3))
