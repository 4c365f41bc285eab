"""Saving and loading ExecuTorch programs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executorch.runtime import Program, Runtime

from polyport.errors import ArtifactError


class LoadedProgram(Program):
    """A program that was read from a file, which it keeps open: it can be saved again after another took its place.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        program = Runtime.get().load_program(path)
        super().__init__(program._program, data=None)
        self._file = path.open("rb")

    def copy_to(self, path: Path) -> None:
        """Write the file once more."""
        self._file.seek(0)
        with path.open("wb") as target:
            shutil.copyfileobj(self._file, target, 2**20)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


def save_programs(programs: Mapping[str, Any], folder: Path) -> dict[str, tuple[str, ...]]:
    """Write the programs of an export.

    Args:
        programs: Component name -> program.
        folder: Where to write.

    Returns:
        Component name -> names of its files.
    """
    files: dict[str, tuple[str, ...]] = {}
    for name, program in programs.items():
        path = folder / f"{name}.pte"
        write_program(program, path)
        files[name] = (path.name,)
    return files


def write_program(program: Any, path: Path) -> None:
    """Write one program, piece by piece.

    Raises:
        ArtifactError: It was loaded by something else, so its bytes are gone.
    """
    if isinstance(program, LoadedProgram):
        program.copy_to(path)
    elif hasattr(program, "write_to_file"):
        with path.open("wb") as file:
            program.write_to_file(file)
    else:
        raise ArtifactError(
            f"{type(program).__name__} can't be written: ExecuTorch doesn't keep the file that a program came from. Copy the file.",
            stage="save",
            backend="executorch",
        )


def load_program(path: Path) -> LoadedProgram:
    """Read a program. Its weights are mapped from the file.

    Raises:
        ArtifactError: It is damaged.
    """
    with path.open("rb") as file:
        head = file.read(8)
    if head[4:6] != b"ET":
        raise ArtifactError(f"{path} is no ExecuTorch program.", stage="load", backend="executorch")
    try:
        return LoadedProgram(path)
    except RuntimeError as error:
        raise ArtifactError(f"{path} can't be read: {error}", stage="load", backend="executorch") from error


def in_memory(program: Any) -> Program:
    """A program as the runtime takes it: one that was just exported goes through a file, so that its weights are mapped."""
    if not hasattr(program, "write_to_file"):
        return program
    handle, name = tempfile.mkstemp(suffix=".pte", prefix="polyport-")
    os.close(handle)
    path = Path(name)
    try:
        write_program(program, path)
        return load_program(path)
    finally:
        path.unlink(missing_ok=True)
