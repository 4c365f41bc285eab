"""From a traced model to an exported ONNX component: the lowering, told in the terms of the export."""

from __future__ import annotations

import attrs

from polyport.errors import ConfigError, ExportError
from polyport.metadata import ExportMetadata
from polyport.pipeline import ExportedComponent, TracedProgram
from polyport_dynamo.lowering import Leaves
from polyport_onnx import torch_internals
from polyport_onnx.config import OnnxConfig
from polyport_onnx.lowering import Lowered, lower_program
from polyport_onnx.overwrite import may_overwrite
from polyport_onnx.translate import UnsupportedOperator

#: Key of `ExportMetadata.backend` for those who run the graph without us: leaves of `in_place` whose input and output may be
#: bound to one buffer.
ONE_BUFFER = "one_buffer"


def to_component(traced: TracedProgram, config: OnnxConfig) -> ExportedComponent:
    """Lower a traced model.

    Args:
        traced: The traced model; not changed.
        config: opset and optimisation.

    Raises:
        ConfigError: The opset is not supported.
        ExportError: An operator can't be translated, or the model keeps state in its buffers.
    """
    low, high = torch_internals.MIN_OPSET, torch_internals.MAX_OPSET
    if config.opset_version is not None and not low <= config.opset_version <= high:
        raise ConfigError(
            f"opset_version {config.opset_version} is not supported: choose one from {low} to {high}."
        )
    metadata = traced.metadata
    try:
        lowered = lower_program(
            traced.program,
            input_names=metadata.input_names,
            output_names=metadata.output_names,
            axes=metadata.dynamic_axes,
            opset_version=config.opset_version,
            optimize=config.optimize,
        )
    except (ValueError, UnsupportedOperator) as error:
        raise ExportError(
            f"The traced graph can't be lowered to ONNX: {error}", stage="lower", backend="onnx"
        ) from error
    return ExportedComponent(program=lowered.model, metadata=_recorded(lowered, metadata))


def _recorded(lowered: Lowered, metadata: ExportMetadata) -> ExportMetadata:
    """The record with what the lowering made of the leaves."""
    leaves, graph = lowered.leaves, lowered.model.graph
    recorded = leaves.recorded(metadata)
    sources = dict(zip(leaves.inputs, graph.inputs, strict=True))
    results = dict(zip(leaves.in_place, graph.outputs[len(leaves.computed) :], strict=True))
    one_buffer = [name for name, result in results.items() if may_overwrite(result, sources[name])]
    return (
        attrs.evolve(recorded, backend={**recorded.backend, ONE_BUFFER: one_buffer}) if results else recorded
    )


def graph_names(metadata: ExportMetadata) -> tuple[list[str], list[str]]:
    """Names of the inputs and outputs of the graph that a record describes (see `Leaves.graph_names`)."""
    return Leaves.of(metadata).graph_names()
