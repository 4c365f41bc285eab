"""Exports for others: the bare program as a file, and a repository of the hub."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyport import storage
from polyport.errors import InputError
from polyport.pipeline import ExportedComponent
from polyport.session import Session

if TYPE_CHECKING:
    from polyport.artifact import ExportedModel


def save_program(component: ExportedComponent, session: Session, target: Path) -> None:
    """Write a bare program, with the files it needs beside it (see `ExportedModel.save`).

    Raises:
        InputError: The suffix is not the format's.
    """
    suffix = session.backend.suffix
    if target.suffix != suffix:
        raise InputError(
            f"A program of format {session.format!r} is saved as *{suffix}, not as {target.name!r}."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        written = session.save({target.stem: component}, Path(folder))[target.stem]
        # a backend may write `openvino_<component>.xml`; what bears the program's name is renamed with it
        stem = Path(written[0]).stem
        names = [target.stem + name.removeprefix(stem) if name.startswith(stem) else name for name in written]
        # the program last: it is what makes the others reachable
        for name, final in reversed([*zip(written, names, strict=True)]):
            Path(folder, name).replace(target.parent / final)
    for template in session.backend.companions:
        if (stale := storage.companion(target.name, template)) not in names:
            (target.parent / stale).unlink(missing_ok=True)


def push(
    exported: ExportedModel, repo_id: str, subfolder: str, processor: Any, options: Mapping[str, Any]
) -> Any:
    """Upload an export to a hub repository, which is created when it is missing (see `ExportedModel.push_to_hub`)."""
    from huggingface_hub import HfApi

    given = dict(options)
    api = HfApi(token=given.pop("token", None))
    api.create_repo(repo_id, exist_ok=True, private=given.pop("private", None))
    with tempfile.TemporaryDirectory() as folder:
        exported.save_pretrained(Path(folder, "export"), processor)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=str(Path(folder, "export")),
            path_in_repo=subfolder or None,
            **given,
        )
