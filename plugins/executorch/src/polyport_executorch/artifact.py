"""Saving and loading ExecuTorch programs.

An export is one file, `model.pte`. One with several components, such as a prompt's graph and a step's, has methods named after them: most
of their weights are the same, and a file holds each weight once.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executorch.runtime import Program, Runtime

from polyport.errors import ArtifactError
from polyport_executorch.methods import METHOD, method_of
from polyport_executorch.weights import Pieces, file_options, without_repeats

#: Several components.
SHARED = "model.pte"


class LoadedProgram(Program):
    """A program that was read from a file, which it keeps open: it can be saved again after another took its place.

    Args:
        path: The file.
        component: Which of its components is meant, where it holds several.
    """

    def __init__(self, path: Path, component: str = "") -> None:
        program = Runtime.get().load_program(path)
        super().__init__(program._program, data=None)
        self._component = component
        self._file = path.open("rb")

    @property
    def shared(self) -> bool:
        """Whether the file holds several components."""
        return method_of(self._component, METHOD) in self.method_names

    @property
    def source(self) -> tuple[int, int]:
        """Which file it is, whatever its name."""
        status = os.fstat(self._file.fileno())
        return status.st_dev, status.st_ino

    def own(self, method: str) -> str:
        """What the file calls a method of the component.

        Args:
            method: Its name in a file of its own.
        """
        return method_of(self._component, method) if self.shared else method

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
    if len(programs) > 1 and (together := in_one(programs)) is not None:
        write_program(together, folder / SHARED)
        return dict.fromkeys(programs, (SHARED,))
    written: dict[Any, str] = {}
    files: dict[str, tuple[str, ...]] = {}
    for name, program in programs.items():
        shared = isinstance(program, LoadedProgram) and program.shared
        key = program.source if shared else name
        if key not in written:
            # components of different exports may have been put together, and one of them may be called as the file is
            free = SHARED not in written.values() and Path(SHARED).stem not in programs
            written[key] = SHARED if shared and free else f"{name}.pte"
            write_program(program, folder / written[key])
        files[name] = (written[key],)
    return files


def in_one(programs: Mapping[str, Any]) -> Any:
    """Programs that were just exported as one, with methods named after them.

    Args:
        programs: Component name -> program.

    Returns:
        `executorch.exir.ExecutorchProgramManager`; None where they can't be, as after loading, or with delegates that name
        different data alike.
    """
    if not all(hasattr(program, "write_to_file") for program in programs.values()):
        return None
    from executorch.exir import ExecutorchBackendConfig, ExecutorchProgramManager
    from executorch.exir._serialize._named_data_store import NamedDataStore

    named = NamedDataStore()
    methods = {}
    for name, program in programs.items():
        for method in program.methods:
            methods[method_of(name, method)] = _whole(program.exported_program(method))
        if program._named_data is not None:
            try:
                named.merge_named_data_store(program._named_data)
            except ValueError:
                return None
    return ExecutorchProgramManager(
        methods,
        backend_config=ExecutorchBackendConfig(**file_options()),
        named_data=named.get_named_data_store_output(),
    )


def _whole(program: Any) -> Any:
    """A program that can be emitted again: emission drops the outputs that are changed buffers, as many as its signature lists."""
    from torch.export.graph_signature import OutputKind

    output = program.graph.output_node()
    kinds = [spec.kind for spec in program.graph_signature.output_specs]
    if len(output.args[0]) < len(kinds):
        rest, anything = iter(output.args[0]), next(iter(program.graph.nodes))
        changed = OutputKind.BUFFER_MUTATION
        output.args = (tuple(anything if kind == changed else next(rest) for kind in kinds),)
    return program


def write_program(program: Any, path: Path) -> None:
    """Write one program, piece by piece.

    Raises:
        ArtifactError: It was loaded by something else, so its bytes are gone.
    """
    if isinstance(program, LoadedProgram):
        program.copy_to(path)
    elif hasattr(program, "write_to_file"):
        pieces = Pieces()
        program.write_to_file(pieces)
        with path.open("wb") as file:
            for piece in without_repeats(pieces):
                file.write(piece)
    else:
        raise ArtifactError(
            f"{type(program).__name__} can't be written: ExecuTorch doesn't keep the file that a program came from. Copy the file.",
            stage="save",
            backend="executorch",
        )


def load_program(path: Path, component: str = "") -> LoadedProgram:
    """Read a program. Its weights are mapped from the file.

    Args:
        path: The file.
        component: Which of its components is meant, where it holds several.

    Raises:
        ArtifactError: It is damaged.
    """
    with path.open("rb") as file:
        head = file.read(8)
    if head[4:6] != b"ET":
        raise ArtifactError(f"{path} is no ExecuTorch program.", stage="load", backend="executorch")
    try:
        return LoadedProgram(path, component)
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
