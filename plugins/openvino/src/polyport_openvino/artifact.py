"""Saving and loading OpenVINO IR.

Graph and weights are two files, `openvino_model.xml` and `openvino_model.bin`. The graphs of an export with several components have
one file of weights in common, since most of their weights are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import openvino as ov

from polyport.errors import ArtifactError
from polyport_openvino import ir
from polyport_openvino.devices import core
from polyport_openvino.messages import reason
from polyport_openvino.weights import merge_weights

#: Weights of an export with several components.
SHARED = "openvino_weights.bin"


def save_models(models: Mapping[str, ov.Model], folder: Path) -> dict[str, tuple[str, ...]]:
    """Write the models of an export with their weights beside them. The models in memory stay as they are.

    The same models give the same bytes, in whatever process: nodes are named by their place in the graph.

    Args:
        models: Component name -> model.
        folder: Where to write.

    Returns:
        Component name -> names of its files: the graph file `openvino_<component>.xml`, and the file with its weights.
    """
    documents = {}
    files: dict[str, tuple[str, ...]] = {}
    for name, model in models.items():
        program = folder / f"openvino_{name}.xml"
        ov.save_model(model, program, compress_to_fp16=False)
        root = ir.parsed(program.read_bytes())
        ir.settle(root, name)
        documents[program.with_suffix(".bin")] = root
        files[name] = (program.name, SHARED if len(models) > 1 else program.with_suffix(".bin").name)
    if len(models) > 1:
        merge_weights(documents, folder / SHARED)
    for weights, root in documents.items():
        weights.with_suffix(".xml").write_bytes(ir.written(root))
    return files


def load_model(files: Sequence[Path]) -> ov.Model:
    """Read a model. Its weights are mapped from their file, and stay right if another export takes the file's place.

    Args:
        files: The graph file, then the file with its weights.

    Raises:
        ArtifactError: The graph file is damaged, refers to weights outside `files`, or holds operators that OpenVINO lacks.
    """
    path = files[0]
    weights = files[1] if len(files) > 1 else None
    try:
        ir.check_references(path.read_bytes(), weights.stat().st_size if weights else 0)
    except ir.IrError as error:
        raise _refused(path, f"{error}.") from error
    try:
        model = core().read_model(path, weights) if weights else core().read_model(path)
    except (RuntimeError, TypeError) as error:
        raise _refused(path, f"is no OpenVINO model: {reason(error)}") from error
    unknown = sorted(
        {node.get_type_name() for node in operators(model) if "Framework" in node.get_type_name()}
    )
    if unknown:
        raise _refused(path, f"holds operators of another framework: {', '.join(unknown)}.")
    return model


def _refused(path: Path, problem: str) -> ArtifactError:
    return ArtifactError(f"{path} {problem}", stage="load", backend="openvino")


def operators(model: ov.Model) -> Iterator[Any]:
    """The nodes of a model, those inside branches and loops too."""
    for node in model.get_ordered_ops():
        yield node
        kind = node.get_type_name()
        if kind == "If":
            for index in range(2):
                yield from operators(node.get_function(index))
        elif kind in ("Loop", "TensorIterator"):
            yield from operators(node.get_function())


def describe_model(model: ov.Model) -> dict[str, Any]:
    """What is in a model, for `polyport inspect`.

    Returns:
        `operators`: name -> how many; `weights`: how many of at least two elements; `precision`: their type -> bytes;
        `variables`, where there are any: name -> type and sizes.
    """
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    weights = 0
    for node in operators(model):
        kind = node.get_type_name()
        if kind not in ("Parameter", "Result", "Constant"):
            counts[kind] += 1
        elif kind == "Constant" and node.get_byte_size() > node.get_element_type().size:
            weights += 1
            sizes[node.get_element_type().get_type_name()] += node.get_byte_size()
    described: dict[str, Any] = {
        "operators": dict(counts.most_common()),
        "weights": weights,
        "precision": dict(sizes.most_common()),
    }
    variables = {variable.info.variable_id: variable.info for variable in model.get_variables()}
    if variables:
        described["variables"] = {
            name: f"{info.data_type.get_type_name()}{info.data_shape}"
            for name, info in sorted(variables.items())
        }
    return described
