"""Small graphs, made by hand, and their records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as opset

from polyport import ExportedModel
from polyport.metadata import ExportMetadata, TensorInfo
from polyport.pipeline import ExportedComponent, RunRequest
from polyport_openvino.runner import ModelRunner

TYPES = {
    "float32": ov.Type.f32,
    "float64": ov.Type.f64,
    "float16": ov.Type.f16,
    "bfloat16": ov.Type.bf16,
    "int64": ov.Type.i64,
    "int32": ov.Type.i32,
    "int16": ov.Type.i16,
    "int8": ov.Type.i8,
    "uint8": ov.Type.u8,
    "bool": ov.Type.boolean,
}


def graph(inputs: Mapping[str, TensorInfo], outputs: Sequence[str], make: Callable[..., Any]) -> ov.Model:
    """A model whose ports are named.

    Args:
        inputs: Name of a port -> what it is.
        outputs: Names of the ports.
        make: Takes the parameters, returns one node or a list of them.
    """
    parameters = []
    for name, info in inputs.items():
        sizes = [size if isinstance(size, int) else -1 for size in info.shape]
        parameter = opset.parameter(ov.PartialShape(sizes), TYPES[info.dtype], name=name)
        parameter.output(0).get_tensor().set_names({name})
        parameters.append(parameter)
    made = make(*parameters)
    results = []
    for name, node in zip(outputs, made if isinstance(made, list) else [made], strict=True):
        if node.get_type_name() != "Parameter":
            node.output(0).get_tensor().set_names({name})
        result = opset.result(node)
        result.set_friendly_name(name)
        results.append(result)
    return ov.Model(results, parameters, "graph")


def infos(**tensors: tuple[Any, ...]) -> dict[str, TensorInfo]:
    """Records of tensors, each `(dtype, size, size...)`."""
    return {name: TensorInfo(name, dtype, tuple(shape)) for name, (dtype, *shape) in tensors.items()}


def runner(
    model: ov.Model,
    inputs: Mapping[str, TensorInfo],
    outputs: Mapping[str, TensorInfo],
    request: RunRequest | None = None,
    **record: Any,
) -> ModelRunner:
    """A runner of a model with its record."""
    metadata = ExportMetadata(inputs=tuple(inputs.values()), outputs=tuple(outputs.values()), **record)
    return ModelRunner(model, metadata, request or RunRequest())


def sums(*arrays: np.ndarray, shape: Sequence[int] = (64, 64)) -> ov.Model:
    """The sum of x and weights."""

    def make(x: Any) -> Any:
        for array in arrays:
            x = opset.add(x, opset.constant(array))
        return x

    return graph({"x": TensorInfo("x", "float32", tuple(shape))}, ["y"], make)


def export(*, shape: Sequence[int] = (64, 64), **models: ov.Model) -> ExportedModel:
    """An export of models that take `x` and return `y`, both of float32."""
    metadata = ExportMetadata(
        inputs=(TensorInfo("x", "float32", tuple(shape)),),
        outputs=(TensorInfo("y", "float32", tuple(shape)),),
    )
    return ExportedModel(
        "openvino",
        {name: ExportedComponent(program=model, metadata=metadata) for name, model in models.items()},
    )
