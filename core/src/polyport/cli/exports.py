"""Finding and loading the export that a command is about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyport.errors import ArtifactError


def locate(directory: str, subfolder: str, revision: str | None) -> Path:
    """The folder of an export, fetched from the Hub where `directory` is no folder.

    Raises:
        ArtifactError: There is none; where exports of several formats lie below, the message lists them.
    """
    from polyport import storage
    from polyport.manifest import MANIFEST

    path = Path(directory).expanduser()
    folder = path / subfolder
    if folder.is_dir() and not (folder / MANIFEST).is_file():
        below = sorted(found.parent.name for found in folder.glob(f"*/{MANIFEST}"))
        if below:
            raise ArtifactError(
                f"{folder} holds several exports: choose one, as in {folder / below[0]} ({', '.join(below)}).",
                stage="load",
            )
        raise ArtifactError(f"{folder} holds no export: there is no {MANIFEST} in it.", stage="load")
    return storage.locate(path if path.is_dir() else directory, subfolder, revision=revision)


def load(
    directory: str,
    subfolder: str,
    *,
    revision: str | None = None,
    device: str | None = None,
    trust: bool = False,
) -> tuple[Any, Path]:
    """Load an export.

    Args:
        directory: A folder, or the id of a repository on the Hub.
        subfolder: Folder of the export in it.
        revision: Branch, tag or commit on the Hub.
        device: Where it shall run.
        trust: Whether pickled content and code of it may be read.

    Returns:
        The `ExportedModel`, and the folder it lies in.

    Raises:
        ArtifactError, BackendNotInstalled: See `ExportedModel.from_pretrained`.
    """
    folder = locate(directory, subfolder, revision)
    from polyport import ExportedModel

    return ExportedModel.from_pretrained(folder, device=device, trust_remote_code=trust), folder
