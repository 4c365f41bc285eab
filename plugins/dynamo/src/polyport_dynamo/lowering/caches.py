"""Caches that a runtime can keep inside itself between the steps of a generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from polyport.caches import find_dtype
from polyport.errors import ArtifactError
from polyport.metadata import ExportMetadata, TensorInfo
from polyport.sizes import compiled
from polyport_dynamo.lowering.leaves import Leaves


def eligible(metadata: ExportMetadata, leaves: Leaves) -> tuple[str, ...]:
    """The leaves that a runtime can keep: parts of a cache that a call takes and returns, one row per row of the batch.

    A static cache stays the caller's: a buffer that is written to where it lies, with a counter of its tokens beside it.

    Args:
        metadata: The record of the traced graph.
        leaves: What the lowering made of its leaves.
    """
    outputs = {info.name: info for info in metadata.outputs}
    batches = {info.shape[0] for info in metadata.inputs if "." not in info.name and info.rank}
    found = []
    for info in metadata.inputs:
        after = outputs.get(info.name)
        if "." not in info.name or after is None or not _changes(info.name, leaves):
            continue
        starts = info.rank > 0 and isinstance(info.shape[0], str) and info.shape[0] in batches
        if starts and info.dtype == after.dtype and info.rank == after.rank and _follows(after, metadata):
            found.append(info.name)
    return tuple(found)


def _changes(name: str, leaves: Leaves) -> bool:
    """Whether a leaf comes back with another content, and is not a static cache's."""
    if name in leaves.in_place:
        owner = name.rpartition(".")[0]
        return leaves.passed_through.get(name) == name and f"{owner}.cumulative_length" not in leaves.inputs
    return name not in leaves.passed_through


def _follows(info: TensorInfo, metadata: ExportMetadata) -> bool:
    """Whether the sizes of an output can be told from those of the inputs."""
    known = {size: 0 for one in metadata.inputs for size in one.shape if isinstance(size, str)}
    for size in info.shape:
        if isinstance(size, str) and size not in known:
            try:
                compiled(size)(known)
            except (ArtifactError, KeyError, ZeroDivisionError):
                return False
    return True


def growing_axis(before: TensorInfo, after: TensorInfo) -> int | None:
    """The one axis along which a leaf comes out longer than it went in; None for a state of fixed size.

    Args:
        before: As an input.
        after: As an output.
    """
    changed = [axis for axis, (a, b) in enumerate(zip(before.shape, after.shape, strict=True)) if a != b]
    return changed[0] if len(changed) == 1 else None


def kept_leaves(metadata: ExportMetadata, key: str) -> tuple[str, ...]:
    """The leaves that a record says a program keeps.

    Args:
        metadata: The record.
        key: Of `ExportMetadata.backend`, under which a backend has recorded them.

    Raises:
        ArtifactError: The record is damaged.
    """
    names = metadata.backend.get(key, [])
    both = set(metadata.input_names) & set(metadata.output_names)
    fits = isinstance(names, list) and all(isinstance(name, str) and name in both for name in names)
    if not fits or len(set(names)) != len(names):
        raise ArtifactError(
            f"The export records {key!r} as {names!r}, which does not fit its inputs and outputs.",
            stage="load",
        )
    return tuple(names)


class KeptCaches:
    """What a record says of the leaves that a program keeps.

    Args:
        metadata: The record.
        names: The leaves.

    Raises:
        ArtifactError: A dtype in the record is none.
    """

    def __init__(self, metadata: ExportMetadata, names: Sequence[str]) -> None:
        inputs = {info.name: (index, info) for index, info in enumerate(metadata.inputs)}
        outputs = {info.name: info for info in metadata.outputs}
        self.names = tuple(names)
        #: Where each is among the inputs of a call.
        self.places = [inputs[name][0] for name in names]
        #: The axis along which each grows; None for a state of fixed size.
        self.growing = [growing_axis(inputs[name][1], outputs[name]) for name in names]
        self.dtypes = [_dtype(outputs[name]) for name in names]
        self._shapes = [outputs[name].shape for name in names]
        self._kinds = set(self._shapes)  # a cache has many leaves, and few kinds of them
        self._sizes = {
            size: compiled(size) for shape in self._shapes for size in shape if isinstance(size, str)
        }
        self._sources: dict[str, tuple[int, int]] = {}
        for index, info in enumerate(metadata.inputs):
            for axis, size in enumerate(info.shape):
                if isinstance(size, str):
                    self._sources.setdefault(size, (index, axis))

    def shapes(self, inputs: Sequence[torch.Tensor]) -> list[torch.Size]:
        """The shape of each after a call.

        Args:
            inputs: Of the call.
        """
        known = {name: inputs[index].shape[axis] for name, (index, axis) in self._sources.items()}
        known |= {name: size(known) for name, size in self._sizes.items()}
        alike = {shape: _concrete(shape, known) for shape in self._kinds}
        return [alike[shape] for shape in self._shapes]


def _concrete(shape: Sequence[Any], sizes: Mapping[str, int]) -> torch.Size:
    return torch.Size(size if isinstance(size, int) else sizes[size] for size in shape)


def _dtype(info: TensorInfo) -> torch.dtype:
    found = find_dtype(info.dtype)
    if found is None:
        raise ArtifactError(
            f"The export records a dtype {info.dtype!r}, which PyTorch doesn't have.", stage="load"
        )
    return found
