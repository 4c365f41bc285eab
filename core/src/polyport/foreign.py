"""Reading what transformers (>= 5.23) records of an export: less than we do, under names we share."""

from __future__ import annotations

from typing import Any

from polyport import structure
from polyport.calling import UNKNOWN
from polyport.metadata import AxisSize, ExportMetadata, TensorInfo


class _Leaf:
    """A leaf without a value: what stands in for a tensor while names are worked out."""


def described_inputs(metadata: ExportMetadata) -> tuple[TensorInfo, ...]:
    """The tensors that go in, as far as the traced kwargs say. Constants are no inputs."""
    if metadata.in_spec is None:
        return ()
    spec = structure.load_structure(metadata.in_spec)
    _, kwargs = structure.unflatten([_Leaf() for _ in range(spec.num_leaves)], spec)
    infos = []
    for name, leaf in structure.flatten_named(kwargs):
        if isinstance(leaf, _Leaf) and name not in metadata.in_constants:
            infos.append(
                _info(name, metadata.kwargs.get(name), dynamic=bool(metadata.export_config.get("dynamic")))
            )
    return tuple(infos)


def _info(name: str, traced: Any, *, dynamic: bool) -> TensorInfo:
    if not isinstance(traced, dict) or not isinstance(traced.get("shape"), list):
        return TensorInfo(name, "", UNKNOWN)
    # which of the axes vary is not recorded, so any size is let through to the runtime
    shape: tuple[AxisSize, ...] = tuple("?" if dynamic else int(size) for size in traced["shape"])
    return TensorInfo(name, str(traced.get("dtype", "")), shape)


def described_outputs(metadata: ExportMetadata) -> tuple[TensorInfo, ...]:
    """The tensors that come out, by name."""
    if metadata.out_spec is None:
        return ()
    spec = structure.load_structure(metadata.out_spec)
    outputs = structure.unflatten([_Leaf() for _ in range(spec.num_leaves)], spec)
    constants = {int(index) for index, _ in metadata.out_constants}
    named = structure.flatten_named(outputs)
    return tuple(
        TensorInfo(name, "", UNKNOWN) for index, (name, _) in enumerate(named) if index not in constants
    )
