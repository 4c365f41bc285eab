"""Finding and loading the export that a command is about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyport.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from polyport.manifest import Manifest


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
    check: Callable[[Manifest, str], None] | None = None,
) -> tuple[Any, Path]:
    """Load an export.

    Args:
        directory: A folder, or the id of a repository on the Hub.
        subfolder: Folder of the export in it.
        revision: Branch, tag or commit on the Hub.
        device: Where it shall run.
        trust: Whether pickled content and code of it may be read.
        check: Called with its manifest and `directory` before anything of it is read.

    Returns:
        The `ExportedModel`, and the folder it lies in.

    Raises:
        ArtifactError, BackendNotInstalled: See `ExportedModel.from_pretrained`.
    """
    folder = locate(directory, subfolder, revision)
    if check is not None:
        from polyport.storage import read_manifest

        check(read_manifest(folder), directory)
    from polyport import ExportedModel

    return ExportedModel.from_pretrained(folder, device=device, trust_remote_code=trust), folder


def only_one_graph(manifest: Manifest, directory: str) -> None:
    """Refuse an export that generates, where one graph is to be called.

    Raises:
        InputError: It is one.
    """
    if manifest.generation is not None:
        raise InputError(
            f"{directory} was exported for generation: it has the parts {', '.join(manifest.components)}, and none of them "
            f"alone is the model. Give it a prompt with `polyport generate {directory} --prompt TEXT`.",
            stage="run",
        )


def only_generating(manifest: Manifest, directory: str) -> None:
    """Refuse an export of one graph, where something is to be generated.

    Raises:
        InputError: It is one.
    """
    if manifest.generation is None:
        raise InputError(
            f"{directory} was not exported for generation: it holds {', '.join(manifest.components)}, the forward of a "
            "model. Call that with `polyport run`, or export the model again with `polyport export --generate`.",
            stage="run",
        )


def processor_source(directory: str, folder: Path) -> str:
    """Where the export's processor is: in its folder, or in its repository, which is then asked for those files."""
    return str(folder) if Path(directory).is_dir() else directory
