"""Reading what transformers (>= 5.23) records of an export: less than we do, under names we share."""

from __future__ import annotations

from typing import Any

from polyport import structure
from polyport.calling import UNKNOWN
from polyport.errors import ArtifactError
from polyport.metadata import AxisSize, ExportMetadata, TensorInfo


def described_inputs(metadata: ExportMetadata) -> tuple[TensorInfo, ...]:
    """The tensors that go in, as far as the traced kwargs say. Constants are no inputs."""
    if metadata.in_spec is None:
        return ()
    spec = structure.load_structure(metadata.in_spec)
    dynamic = bool(metadata.export_config.get("dynamic"))
    infos = []
    for path in structure.leaf_names(spec):
        place, _, name = path.partition(".")
        if place != "1" or not name:  # the structure is `(args, kwargs)`, and args are empty
            raise ArtifactError(f"The export takes {path!r}, which is no keyword argument.", stage="load")
        if name not in metadata.in_constants:
            infos.append(_info(name, metadata.kwargs.get(name), dynamic=dynamic))
    return tuple(infos)


def _info(name: str, traced: Any, *, dynamic: bool) -> TensorInfo:
    if not isinstance(traced, dict) or not isinstance(traced.get("shape"), list):
        return TensorInfo(name, "", UNKNOWN)
    # which of the axes vary is not recorded, so any size is let through to the runtime
    sizes = traced["shape"]
    if not all(isinstance(size, int) for size in sizes):
        raise ArtifactError(f"The export records the shape {sizes!r} for {name!r}.", stage="load")
    shape: tuple[AxisSize, ...] = tuple("?" if dynamic else size for size in sizes)
    return TensorInfo(name, str(traced.get("dtype", "")).removeprefix("torch."), shape)


def described_outputs(metadata: ExportMetadata) -> tuple[TensorInfo, ...]:
    """The tensors that come out, by name."""
    if metadata.out_spec is None:
        return ()
    spec = structure.load_structure(metadata.out_spec)
    constants = metadata.constant_outputs()
    names = structure.leaf_names(spec)
    return tuple(TensorInfo(name, "", UNKNOWN) for index, name in enumerate(names) if index not in constants)
