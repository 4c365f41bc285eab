"""From a traced model to an exported ONNX component: the lowering, told in the terms of the export."""

from __future__ import annotations

from polyport.errors import ConfigError, ExportError
from polyport.metadata import ExportMetadata
from polyport.pipeline import ExportedComponent, TracedProgram
from polyport_onnx import torch_internals
from polyport_onnx.config import OnnxConfig
from polyport_onnx.lowering import lower_program
from polyport_onnx.translate import UnsupportedOperator


def to_component(traced: TracedProgram, config: OnnxConfig) -> ExportedComponent:
    """Lower a traced model.

    Args:
        traced: The traced model; not changed.
        config: opset and optimisation.

    Raises:
        ConfigError: The opset is not supported.
        ExportError: An operator can't be translated, or the model keeps state in its inputs.
    """
    low, high = torch_internals.MIN_OPSET, torch_internals.MAX_OPSET
    if config.opset_version is not None and not low <= config.opset_version <= high:
        raise ConfigError(
            f"opset_version {config.opset_version} is not supported: choose one from {low} to {high}."
        )
    inputs, outputs = graph_names(traced.metadata)
    dynamic = traced.metadata.dynamic_axes
    try:
        model = lower_program(
            traced.program,
            input_names=inputs,
            output_names=outputs,
            axes={
                name: dynamic[leaf]
                for name, leaf in zip(inputs, traced.metadata.input_names, strict=True)
                if leaf in dynamic
            },
            opset_version=config.opset_version,
            optimize=config.optimize,
        )
    except (ValueError, UnsupportedOperator) as error:
        raise ExportError(
            f"The traced graph can't be lowered to ONNX: {error}", stage="lower", backend="onnx"
        ) from error
    return ExportedComponent(program=model, metadata=traced.metadata)


def graph_names(metadata: ExportMetadata) -> tuple[list[str], list[str]]:
    """Names of the graph's inputs and outputs: those of the leaves.

    A graph can't have an input and an output of one name, so a leaf that goes in and comes out (a mask, a cache) is
    `input.<name>` on one side and `output.<name>` on the other.
    """
    both = set(metadata.input_names) & set(metadata.output_names)
    inputs = [f"input.{name}" if name in both else name for name in metadata.input_names]
    outputs = [f"output.{name}" if name in both else name for name in metadata.output_names]
    return inputs, outputs
