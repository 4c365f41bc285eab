"""Saving and loading `.pt2` archives without pickles.

`torch.export.save` pickles the sample inputs; ours are left out, so that everything in our archives is raw bytes and JSON.
What others wrote is checked before torch reads it (see `polyport_dynamo.inspection`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from polyport.errors import ArtifactError
from polyport_dynamo.inspection import check_archive


def save_program(program: torch.export.ExportedProgram, path: Path) -> tuple[str, ...]:
    """Write a program.

    Args:
        program: The program. Notes of where in the source each node came from are dropped: they hold paths of this
            machine, and would make the bytes depend on them.
        path: The file.

    Returns:
        The names of the files written.
    """
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)
    sample = program._example_inputs
    program._example_inputs = None
    try:
        torch.export.save(program, path)
    finally:
        program._example_inputs = sample
    return (path.name,)


def load_program(path: Path, *, trust: bool) -> torch.export.ExportedProgram:
    """Read a program.

    Args:
        path: The file.
        trust: Read it although it holds pickled content or expressions that could run code.

    Raises:
        ArtifactError: The file is damaged, or needs trust that was not given.
    """
    if not trust:
        check_archive(path)
    try:
        with _errors_only("torch._export.serde.serialize"), _errors_only("torch.export"):
            return torch.export.load(str(path))
    except Exception as error:
        raise ArtifactError(
            f"{path} can't be read by torch {torch.__version__}: {type(error).__name__}: {error}",
            stage="load",
            backend="dynamo",
        ) from error


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
