"""Saving and loading ONNX files.

Graph and weights are two files, `model.onnx` and `model.onnx.data`, whatever the size: protobuf ends at 2 GB, a reader can map
the weights instead of copying them, and the graph alone stays small enough to look at. The graphs of an export with several
components have one weight file in common, since most of their weights are the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from polyport.errors import ArtifactError
from polyport_onnx.weights import identity, map_weights, placed, write_weights

#: Key of a loaded model's `meta` that holds the files it was read from, the graph file first.
SOURCE = "polyport_onnx.source"

#: Weights of an export with several components.
SHARED = "weights.onnx.data"


def save_models(models: Mapping[str, ir.Model], folder: Path) -> dict[str, tuple[str, ...]]:
    """Write the models of an export with their weights beside them. The models in memory stay as they are.

    Args:
        models: Component name -> model. Weights may lie in memory or in the files of a loaded export; those that are equal are
            written once.
        folder: Where to write.

    Returns:
        Component name -> names of its files: the graph file `<component>.onnx`, and the weight file where it has weights
        there.
    """
    data = SHARED if len(models) > 1 else "".join(f"{name}.onnx.data" for name in models)
    external = write_weights(models.values(), folder / data)
    files: dict[str, tuple[str, ...]] = {}
    for name, model in models.items():
        program = f"{name}.onnx"
        with placed(model, external) as outside:
            ir.save(model, folder / program)
        files[name] = (program, data) if outside else (program,)
    return files


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
        map_weights(model, path.parent)
    except Exception as error:
        raise _refused(path, f"is no readable ONNX file: {error}") from error
    model.meta[SOURCE] = {file: identity(file) for file in files}
    return model


def source_of(model: ir.Model) -> Path | None:
    """The graph file that a model was read from; None for one that was not, or whose files were replaced since."""
    found: dict[Path, tuple[int, ...]] = model.meta.get(SOURCE, {})
    try:
        unchanged = all(identity(file) == before for file, before in found.items())
    except OSError:
        return None
    return next(iter(found), None) if unchanged else None


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
