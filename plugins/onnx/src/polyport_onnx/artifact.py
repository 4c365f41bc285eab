"""Saving and loading ONNX files.

Graph and weights are two files, `model.onnx` and `model.onnx.data`, whatever the size: protobuf ends at 2 GB, a reader can map
the weights instead of copying them, and the graph alone stays small enough to look at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
from polyport.errors import ArtifactError

#: Key of a loaded model's `meta` under which the runner finds the file it was read from.
SOURCE = "polyport_onnx.source"

#: Weights below this size (bytes) stay inside the graph file: shape operands, small biases and scalars.
_INLINE_BELOW = 1024

#: Offsets of larger weights, as ONNX Runtime wants them to map a file.
_ALIGNMENT = 4096


def save_model(model: ir.Model, path: Path) -> tuple[str, ...]:
    """Write a model with its weights beside it. The model in memory stays as it is.

    Args:
        model: The model. Its weights may lie in memory or in the files of a loaded export.
        path: The graph file.

    Returns:
        Names of the files written: the graph file, and the weight file where there are weights to put there.
    """
    data = f"{path.name}.data"
    ir.save(model, path, external_data=data, size_threshold_bytes=_INLINE_BELOW, alignment=_ALIGNMENT)
    return (path.name, data) if (path.parent / data).exists() else (path.name,)


def load_model(files: Sequence[Path]) -> ir.Model:
    """Read a model. Its weights stay in their file until they are used.

    Args:
        files: The graph file, then its weight files.

    Raises:
        ArtifactError: The graph file is damaged, or refers to weights outside `files`.
    """
    path = files[0]
    try:
        model = ir.load(path)
    except Exception as error:
        raise ArtifactError(f"{path} is no readable ONNX file: {error}", stage="load", backend="onnx") from error
    _check_external_data(model, path, {file.name for file in files[1:]})
    model.meta[SOURCE] = path
    return model


def _check_external_data(model: ir.Model, path: Path, allowed: set[str]) -> None:
    """Refuse weights that lie anywhere but in the export's own files, or outside their bounds.

    Raises:
        ArtifactError: The model refers to such a weight.
    """
    sizes = {name: (path.parent / name).stat().st_size for name in allowed}
    for graph in [model.graph, *model.functions.values()]:
        for tensor in _tensors(graph):
            if not isinstance(tensor, ir.ExternalTensor):
                continue
            location = str(tensor.location)
            if location not in sizes:
                raise ArtifactError(
                    f"{path} keeps the weight {tensor.name!r} in {location!r}, which is none of the export's files.",
                    stage="load",
                    backend="onnx",
                )
            offset, length = tensor.offset or 0, tensor.length if tensor.length is not None else tensor.nbytes
            if offset < 0 or length < 0 or offset + length > sizes[location] or length < tensor.nbytes:
                raise ArtifactError(
                    f"{path}: the weight {tensor.name!r} lies outside {location!r}.", stage="load", backend="onnx"
                )


def _tensors(graph: Any) -> list[Any]:
    """Every tensor of a graph, those in attributes and in subgraphs included."""
    found = [value.const_value for value in getattr(graph, "initializers", {}).values()]
    for node in ir.traversal.RecursiveGraphIterator(graph):
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.TENSOR:
                found.append(attribute.value)
            elif attribute.type == ir.AttributeType.TENSORS:
                found.extend(attribute.value)
            elif attribute.type == ir.AttributeType.GRAPH:
                found.extend(value.const_value for value in attribute.value.initializers.values())
    return found


def describe_model(model: ir.Model) -> dict[str, Any]:
    """What is in a model, for `polyport inspect`."""
    counts = Counter(
        f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
    )
    return {
        "operators": dict(counts.most_common()),
        "opset": dict(model.opset_imports),
        "ir_version": model.ir_version,
        "weights": sum(1 for value in model.graph.initializers.values() if value.const_value is not None),
    }
