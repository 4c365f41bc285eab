"""From a traced model to an exported OpenVINO component: the lowering, told in the terms of the export."""

from __future__ import annotations

# what `openvino.save_model` does with its option of this name
from openvino._offline_transformations import compress_model_transformation

from polyport.errors import ExportError
from polyport.pipeline import ExportedComponent, TracedProgram
from polyport_openvino.config import OpenVINOConfig
from polyport_openvino.lowering import lower_program, name_axes
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
            traced.program,
            input_names=metadata.input_names,
            output_names=metadata.output_names,
            stateful=config.stateful,
        )
    except (ValueError, UnsupportedOperator) as error:
        raise ExportError(
            f"The traced graph can't be lowered to OpenVINO: {error}", stage="lower", backend="openvino"
        ) from error
    name_axes(lowered.model, lowered.leaves, metadata)
    recorded = make_stateful(lowered, metadata) if config.stateful else lowered.leaves.recorded(metadata)
    if config.compress_to_fp16:
        compress_model_transformation(lowered.model)
    return ExportedComponent(program=lowered.model, metadata=recorded)
