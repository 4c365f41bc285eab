"""`export.json`: what lies in an export's directory, read with suspicion.

A manifest comes from disk or from a hub, so it is data that may be damaged or hostile. File names are single plain names,
a file is what it resolves to (inside the directory, or among the blobs of the hub's cache), sizes and SHA-256 sums must
agree before any backend sees a byte.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from polyport.errors import ArtifactError
from polyport.generation.record import GenerationRecord
from polyport.metadata import ExportMetadata

MANIFEST = "export.json"

#: Version of the manifest we write, and the newest we read.
SCHEMA_VERSION = 1

#: A manifest of thousands of components with large caches stays far below this.
_MAX_MANIFEST_BYTES = 64 * 2**20

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")


def is_plain_name(name: Any) -> bool:
    """Whether a file of an export may have that name: one plain name, no path."""
    return isinstance(name, str) and _PLAIN_NAME.fullmatch(name) is not None


@attrs.frozen
class FileRecord:
    """One file of an export: its name, size in bytes and SHA-256 sum (None where another tool didn't record them)."""

    name: str
    size: int | None = None
    sha256: str | None = None


@attrs.frozen
class ComponentRecord:
    """One component: its files, the program file first, and its metadata."""

    files: tuple[FileRecord, ...]
    metadata: ExportMetadata


@attrs.frozen
class Manifest:
    """What an export's directory holds.

    Args:
        export_format: The format of all its components.
        components: Component name -> record.
        complete: Whether it lists all files; other tools name the program file only.
        generation: How the components make one model that generates; None for an export of one graph.
        leftovers: The file with the tensors that no component covers; None where there are none.
    """

    export_format: str
    components: Mapping[str, ComponentRecord]
    complete: bool = True
    generation: GenerationRecord | None = None
    leftovers: FileRecord | None = None

    def file_names(self) -> list[str]:
        """Names of all files the components need, each once."""
        files = [file for record in self.components.values() for file in record.files]
        return list(
            dict.fromkeys(file.name for file in (*files, *([self.leftovers] if self.leftovers else ())))
        )

    def write(self, directory: Path) -> None:
        """Write `export.json`; the same export gives the same bytes."""
        components = {
            name: {
                "file": record.files[0].name,
                "files": [attrs.asdict(file) for file in record.files],
                "metadata": record.metadata.to_dict(),
            }
            for name, record in self.components.items()
        }
        document: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "export_format": self.export_format,
            "components": components,
        }
        if self.generation is not None:
            document["generation"] = self.generation.to_dict()
        if self.leftovers is not None:
            document["leftovers"] = attrs.asdict(self.leftovers)
        text = json.dumps(document, indent=2, ensure_ascii=False)
        (directory / MANIFEST).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest file.

        Raises:
            ArtifactError: It is missing, damaged, of a newer version, or names files it must not name.
        """
        try:
            if path.stat().st_size > _MAX_MANIFEST_BYTES:
                raise ArtifactError(f"{path} is larger than any manifest.", stage="load")
            if not path.is_file():  # reading a pipe would wait for ever
                raise ArtifactError(f"{path} is no file.", stage="load")
            document = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ArtifactError(
                f"{path.parent} holds no export: there is no {MANIFEST}. Exports of several formats lie in subfolders: "
                "pass subfolder=...",
                stage="load",
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            raise ArtifactError(f"{path} can't be read: {error}.", stage="load") from error
        return cls._parse(document, path)

    @classmethod
    def _parse(cls, document: Any, path: Path) -> Manifest:
        if not isinstance(document, dict):
            raise ArtifactError(f"{path} is no manifest: it holds no JSON object.", stage="load")
        version = document.get("schema_version", 1)
        if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
            raise ArtifactError(
                f"{path} has schema version {version!r}; this polyport reads up to {SCHEMA_VERSION}. Update polyport.",
                stage="load",
            )
        export_format, entries = document.get("export_format"), document.get("components")
        if not isinstance(export_format, str) or not isinstance(entries, dict) or not entries:
            raise ArtifactError(f"{path} names no export format or no components.", stage="load")
        complete = all(isinstance(entry, dict) and "files" in entry for entry in entries.values())
        generation, leftovers = document.get("generation"), document.get("leftovers")
        if generation is not None and not isinstance(generation, dict):
            raise ArtifactError(f"{path} describes the generation wrongly.", stage="load")
        return cls(
            export_format,
            {name: _component(name, entry, path) for name, entry in entries.items()},
            complete,
            None if generation is None else GenerationRecord.from_dict(generation),
            None if leftovers is None else _plain(_file(leftovers, "the leftovers", path), path),
        )


def _component(name: str, entry: Any, path: Path) -> ComponentRecord:
    if not _PLAIN_NAME.fullmatch(name):
        raise ArtifactError(f"{path} names a component {name!r}, which is no plain name.", stage="load")
    if not isinstance(entry, dict) or not isinstance(entry.get("metadata", {}), dict):
        raise ArtifactError(f"{path} describes the component {name!r} wrongly.", stage="load")
    listed = entry.get("files", [{"name": entry.get("file")}])
    if not isinstance(listed, list):
        raise ArtifactError(f"{path} lists the files of {name!r} wrongly.", stage="load")
    files = tuple(_file(item, name, path) for item in listed)
    for file in files:
        _plain(file, path)
    if not files:
        raise ArtifactError(f"{path} lists no file for {name!r}.", stage="load")
    return ComponentRecord(files, ExportMetadata.from_dict(entry.get("metadata", {})))


def _plain(file: FileRecord, path: Path) -> FileRecord:
    if not _PLAIN_NAME.fullmatch(file.name):
        raise ArtifactError(
            f"{path} names the file {file.name!r}. An export's files lie beside its manifest, under plain names.",
            stage="load",
        )
    return file


def _file(item: Any, component: str, path: Path) -> FileRecord:
    kinds: dict[str, Any] = {"name": str, "size": (int, type(None)), "sha256": (str, type(None))}
    if not isinstance(item, dict) or not all(isinstance(item.get(key), kind) for key, kind in kinds.items()):
        raise ArtifactError(f"{path} lists a file of {component!r} wrongly: {item!r}.", stage="load")
    return FileRecord(item["name"], item.get("size"), item.get("sha256"))


def record_file(path: Path) -> FileRecord:
    """The record of a file that was just written."""
    return FileRecord(path.name, path.stat().st_size, _sha256(path))


def checked_file(directory: Path, record: FileRecord) -> Path:
    """The path of a file of an export, after checking where it lies, its size and its SHA-256 sum.

    Raises:
        ArtifactError: The file is missing, lies outside the export, or is not the one that was saved.
    """
    path = directory / record.name
    try:
        real = path.resolve()
    except (OSError, RuntimeError) as error:  # links that lead to each other
        raise ArtifactError(f"{path} can't be followed: {error}.", stage="load") from error
    if not real.is_file():
        raise ArtifactError(
            f"{directory} lacks the file {record.name!r} that its manifest names.", stage="load"
        )
    if not any(real.is_relative_to(root) for root in _allowed_roots(directory)):
        raise ArtifactError(f"{path} leads out of the export, to {real}.", stage="load")
    if record.size is not None and real.stat().st_size != record.size:
        raise ArtifactError(
            f"{path} has {real.stat().st_size} bytes where {record.size} were saved: it is truncated or was replaced.",
            stage="load",
        )
    if record.sha256 is not None and _sha256(real) != record.sha256:
        raise ArtifactError(f"{path} is not the file that was saved: its SHA-256 sum differs.", stage="load")
    return path


def _allowed_roots(directory: Path) -> list[Path]:
    """The export's directory, and the blobs its files link to when it lies in the hub's cache.

    There, `<repo>/snapshots/<revision>/...` holds links into `<repo>/blobs`.
    """
    here = directory.resolve()
    snapshots = (parent.parent for parent in (here, *here.parents) if parent.parent.name == "snapshots")
    return [here, *(folder.parent / "blobs" for folder in snapshots)]


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
