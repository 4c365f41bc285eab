"""From a traced model to an exported OpenVINO component: the lowering, told in the terms of the export."""

from __future__ import annotations

from polyport.errors import ExportError
from polyport.pipeline import ExportedComponent, TracedProgram
from polyport_openvino.config import OpenVINOConfig
from polyport_openvino.lowering import lower_program
from polyport_openvino.stateful import make_stateful
from polyport_openvino.translate import UnsupportedOperator


def to_component(traced: TracedProgram, config: OpenVINOConfig) -> ExportedComponent:
    """Lower a traced model.

    Args:
        traced: The traced model; not changed.
        config: Compression and state.

    Raises:
        ExportError: An operator can't be translated, or the model keeps state in its buffers.
    """
    metadata = traced.metadata
    try:
        lowered = lower_program(
            traced.program, input_names=metadata.input_names, output_names=metadata.output_names
        )
    except (ValueError, UnsupportedOperator) as error:
        raise ExportError(
            f"The traced graph can't be lowered to OpenVINO: {error}", stage="lower", backend="openvino"
        ) from error
    recorded = lowered.leaves.recorded(metadata)
    if config.stateful:
        recorded = make_stateful(lowered, recorded)
    return ExportedComponent(program=lowered.model, metadata=recorded)
