"""Saving and loading `.pt2` archives without pickles.

`torch.export.save` pickles the sample inputs; ours are left out, so that everything in our archives is raw bytes and JSON.
What others wrote is checked before torch reads it (see `polyport_dynamo.inspection`).
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from polyport.caches import register_caches
from polyport.errors import ArtifactError
from polyport_dynamo.attach import attach
from polyport_dynamo.inspection import check_archive
from polyport_dynamo.quicker import quicker
from polyport_dynamo.shared import (
    MAPPING,
    WEIGHTS_FILE,
    Places,
    dump_places,
    shared_weights,
    stand_in,
    write_weights,
)


def save_programs(
    programs: Mapping[str, torch.export.ExportedProgram], directory: Path
) -> dict[str, tuple[str, ...]]:
    """Write the programs of an export, `NAME.pt2` each.

    A single one is what `torch.export.save` writes. Several have their weights in a file beside them, each once (see
    `polyport_dynamo.shared`).

    Args:
        programs: Component name -> program.
        directory: Where to write.

    Returns:
        Component name -> names of its files.
    """
    paths = {name: directory / f"{name}.pt2" for name in programs}
    if len(programs) == 1:
        return {name: save_program(program, paths[name]) for name, program in programs.items()}
    tensors, places = shared_weights(programs)
    if tensors:
        write_weights(tensors, directory / WEIGHTS_FILE)
    return {
        name: save_program(program, paths[name], places[name]) + ((WEIGHTS_FILE,) if places[name] else ())
        for name, program in programs.items()
    }


def save_program(
    program: torch.export.ExportedProgram, path: Path, places: Places | None = None
) -> tuple[str, ...]:
    """Write a program.

    Args:
        program: The program. Notes of where in the source each node came from are dropped: they hold paths of this
            machine, and would make the bytes depend on them.
        path: The file.
        places: Where weights are that the file shall not hold.

    Returns:
        The names of the files written.
    """
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)
    bare = copy.copy(program)
    bare._example_inputs = None
    if places:
        bare._state_dict = {k: stand_in(v) if k in places else v for k, v in program.state_dict.items()}
        bare._constants = {k: stand_in(v) if k in places else v for k, v in program.constants.items()}
    torch.export.save(bare, path, extra_files={MAPPING: dump_places(places)} if places else None)
    return (path.name,)


def load_program(path: Path, *, trust: bool, beside: Sequence[Path] = ()) -> torch.export.ExportedProgram:
    """Read a program.

    Args:
        path: The file.
        trust: Read it although it holds pickled content or expressions that could run code.
        beside: The other files of its component, among them the one with its weights if they are not in `path`.

    Raises:
        ArtifactError: A file is damaged, or needs trust that was not given.
    """
    if not trust:
        check_archive(path)
    register_caches()  # the structure of a call may hold them
    extra = {MAPPING: ""}
    try:
        with _errors_only("torch._export.serde.serialize"), _errors_only("torch.export"), quicker():
            program = torch.export.load(str(path), extra_files=extra)
        attach(program, extra[MAPPING], beside)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}", stage="load", backend="dynamo") from error
    except Exception as error:
        raise ArtifactError(
            f"{path} can't be read by torch {torch.__version__}: {type(error).__name__}: {error}",
            stage="load",
            backend="dynamo",
        ) from error
    return program


@contextmanager
def _errors_only(name: str) -> Iterator[None]:
    """Keep a logger's warnings back: torch prints the traceback of what is raised here, and one of them it can't format."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def count_operators(program: torch.export.ExportedProgram) -> dict[str, int]:
    """Operator -> how often it occurs in the graph, the most frequent first."""
    counts = Counter(
        str(node.target)
        for module in program.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if node.op == "call_function"
    )
    return dict(counts.most_common())
