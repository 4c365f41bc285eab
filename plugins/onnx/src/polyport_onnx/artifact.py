"""Saving and loading ONNX files.

Graph and weights are two files, `model.onnx` and `model.onnx.data`, whatever the size: protobuf ends at 2 GB, a reader can map
the weights instead of copying them, and the graph alone stays small enough to look at.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from polyport.errors import ArtifactError

#: Key of a loaded model's `meta` that holds the files it was read from, the graph file first.
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
    weights = path.parent / data
    if weights.exists() and not weights.stat().st_size:
        weights.unlink()  # all weights are small enough for the graph file
    return (path.name, data) if weights.exists() else (path.name,)


def load_model(files: Sequence[Path], *, trust: bool = False) -> ir.Model:
    """Read a model. Its weights are mapped from their file, and stay right if another export takes the file's place.

    Args:
        files: The graph file, then its weight files.
        trust: Accept graphs that hold compiled programs.

    Raises:
        ArtifactError: The graph file is damaged, refers to weights outside `files`, or needs trust that was not given.
    """
    path = files[0]
    try:
        proto = onnx.load(str(path), format="protobuf", load_external_data=False)
    except Exception as error:
        raise _refused(path, f"is no readable ONNX file: {error}") from error
    if not proto.HasField("graph"):
        raise _refused(path, "is no readable ONNX file: it holds no graph.")
    _check(proto, path, {file.name: file.stat().st_size for file in files[1:]}, trust=trust)
    try:
        model = ir.from_proto(proto)
        ir.external_data.set_base_dir(model.graph, path.parent)
        _map_weights(model, path.parent)
    except Exception as error:
        raise _refused(path, f"is no readable ONNX file: {error}") from error
    model.meta[SOURCE] = {file: _identity(file) for file in files}
    return model


def source_of(model: ir.Model) -> Path | None:
    """The graph file that a model was read from; None for one that was not, or whose files were replaced since."""
    found: dict[Path, tuple[int, ...]] = model.meta.get(SOURCE, {})
    try:
        unchanged = all(_identity(file) == identity for file, identity in found.items())
    except OSError:
        return None
    return next(iter(found), None) if unchanged else None


def _identity(file: Path) -> tuple[int, ...]:
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _refused(path: Path, problem: str) -> ArtifactError:
    return ArtifactError(f"{path} {problem}", stage="load", backend="onnx")


# ── what a file may refer to ────────────────────────────────────────────────────────────────────────────────────────


def _check(proto: onnx.ModelProto, path: Path, sizes: Mapping[str, int], *, trust: bool) -> None:
    """Refuse weights that lie anywhere but in the export's own files, or outside their bounds.

    The file itself is looked at, not what a reader makes of it: ONNX Runtime reads it again, and sees more of it.

    Raises:
        ArtifactError: The model refers to such a weight, or holds a compiled program that was not trusted.
    """
    for message in _messages(proto):
        if isinstance(message, onnx.NodeProto) and message.op_type == "EPContext" and not trust:
            raise _refused(
                path,
                "holds a program that was compiled for a provider. If you trust its origin, load it with "
                "trust_remote_code=True.",
            )
        if isinstance(message, onnx.TensorProto) and message.data_location == onnx.TensorProto.EXTERNAL:
            _check_weight(message, path, sizes)


def _messages(message: Any) -> Iterator[Any]:
    """Nodes and tensors of a model, wherever they are: subgraphs, functions, attributes, sparse tensors..."""
    stack = [message]
    while stack:
        message = stack.pop()
        if isinstance(message, (onnx.NodeProto, onnx.TensorProto)):
            yield message
        if isinstance(message, (onnx.TensorProto, onnx.ValueInfoProto)):
            continue
        for field, value in message.ListFields():
            if field.message_type is not None:
                stack.extend([value] if hasattr(value, "ListFields") else value)


def _check_weight(tensor: onnx.TensorProto, path: Path, sizes: Mapping[str, int]) -> None:
    entries = [(entry.key, entry.value) for entry in tensor.external_data]
    values = dict(entries)
    location = values.get("location", "")
    if location not in sizes or len(values) != len(entries):
        # a key that is there twice is read one way here and another way there
        raise _refused(
            path, f"keeps the weight {tensor.name!r} in {location!r}, which is none of the export's files."
        )
    try:
        offset = int(values.get("offset", 0))
        needed = (math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth + 7) // 8
        length = int(values.get("length", needed))
    except (ValueError, TypeError) as error:
        raise _refused(path, f"describes the weight {tensor.name!r} wrongly: {error}.") from error
    negative = any(dim < 0 for dim in tensor.dims) or offset < 0
    if negative or length < needed or offset + length > sizes[location]:
        raise _refused(path, f"keeps the weight {tensor.name!r} outside {location!r}.")


def _map_weights(model: ir.Model, folder: Path) -> None:
    """Back the weights by one mapping per file, in place of onnx-ir's one per weight.

    onnx-ir refuses files that are links to somewhere else, as those in the hub's cache are; where they may lead was checked
    before (`polyport.manifest.checked_file`).
    """
    mapped: dict[str, np.ndarray] = {}
    for value in _initializers(model):
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype.bitwidth < 8:
            continue
        name = str(tensor.location)
        if tensor.nbytes == 0:
            array = np.empty(tensor.shape.numpy(), tensor.dtype.numpy())
        else:
            if name not in mapped:
                mapped[name] = np.memmap(folder / name, np.uint8, mode="r")
            start = tensor.offset or 0
            flat = mapped[name][start : start + tensor.nbytes]
            array = np.asarray(flat).view(tensor.dtype.numpy()).reshape(tensor.shape.numpy())
        value.const_value = ir.Tensor(
            array,
            dtype=tensor.dtype,
            shape=tensor.shape,
            name=tensor.name,
            doc_string=tensor.doc_string,
            metadata_props=dict(tensor.metadata_props),
        )


def _initializers(model: ir.Model) -> Iterator[ir.Value]:
    yield from model.graph.initializers.values()
    graphs: list[Any] = [model.graph, *model.functions.values()]
    for graph in graphs:
        for node in ir.traversal.RecursiveGraphIterator(graph):
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    yield from attribute.value.initializers.values()
                elif attribute.type == ir.AttributeType.GRAPHS:
                    for inner in attribute.value:
                        yield from inner.initializers.values()


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
