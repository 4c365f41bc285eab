"""Caches inside the model: what goes in and comes out at every step becomes a variable of the runtime.

A variable is read through `Gather(variable, beam_idx)`: the rows that a step continues from, in the order in which it continues
them. OpenVINO's CPU fuses that, the concatenation with the new token, and attention into one operator that writes the token
behind the others and moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import openvino as ov
import openvino.opset15 as opset
from openvino import op

from polyport.metadata import ExportMetadata, TensorInfo
from polyport_dynamo.lowering.caches import eligible, kept_leaves
from polyport_openvino.lowering import Lowered

#: Name of the input that says which rows of the variables a call continues from.
BEAM_IDX = "beam_idx"

#: Key of `ExportMetadata.backend`: the leaves that are variables.
VARIABLES = "variables"


def variables_of(metadata: ExportMetadata) -> tuple[str, ...]:
    """The leaves of a record that are variables; their ids are their names.

    Raises:
        ArtifactError: The record is damaged.
    """
    return kept_leaves(metadata, VARIABLES)


def make_stateful(lowered: Lowered, metadata: ExportMetadata) -> ExportMetadata:
    """Turn the caches of a lowered model into variables, in place.

    Args:
        lowered: The model; changed.
        metadata: The record of the traced graph.

    Returns:
        The record of the model, with what became variables.
    """
    model, leaves = lowered.model, lowered.leaves
    names = eligible(metadata, leaves)
    if not names:
        return leaves.recorded(metadata)
    parameters = dict(zip(leaves.inputs, model.get_parameters(), strict=True))
    results = dict(zip((*leaves.computed, *leaves.in_place), model.get_results(), strict=True))
    infos = {info.name: info for info in metadata.inputs}
    beam_idx = opset.parameter([-1], np.int32, name=BEAM_IDX)
    beam_idx.output(0).get_tensor().set_names({BEAM_IDX})
    starts = _Starts({name: parameters[name] for name in parameters if name not in names}, infos)
    zero = opset.constant(np.int64(0))
    sinks = []
    for name in names:
        parameter, result = parameters[name], results[name]
        variable = _variable(name, parameter)
        start = starts.zeros(infos[name], parameter.get_element_type())
        rows = opset.gather(op.read_value(start, variable).output(0), beam_idx, zero)
        for reader in parameter.output(0).get_target_inputs():
            reader.replace_source_output(rows.output(0))
        sinks.append(op.assign(_whole(result.input_value(0)), variable))
    for name in names:
        model.remove_parameter(parameters[name])
        model.remove_result(results[name])
    model.add_parameters([beam_idx])
    model.add_sinks(sinks)
    model.validate_nodes_and_infer_types()
    recorded = leaves.without(names).recorded(metadata)
    return attrs.evolve(recorded, backend={**recorded.backend, VARIABLES: list(names)})


def _whole(value: ov.Output) -> Any:
    """The node of a value. `Assign` takes a node's first result."""
    if value.get_index() == 0:
        return value.get_node()
    return opset.convert(value, value.get_element_type().get_type_name())


def _variable(name: str, parameter: Any) -> Any:
    info = op.util.VariableInfo()
    info.data_shape, info.data_type = parameter.get_partial_shape(), parameter.get_element_type()
    info.variable_id = name
    return op.util.Variable(info)


class _Starts:
    """Variables before the first step: axes that other inputs have too are as long as theirs, and others empty."""

    def __init__(self, parameters: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> None:
        self._sources = {
            size: (parameters[name], axis)
            for name in reversed(list(parameters))
            for axis, size in enumerate(infos[name].shape)
            if isinstance(size, str)
        }
        self._made: dict[Any, Any] = {}

    def zeros(self, info: TensorInfo, kind: ov.Type) -> Any:
        """What a variable starts with; made once for all of one shape and type."""
        key = (info.shape, kind.get_type_name())
        if key not in self._made:
            sizes = opset.concat([self._size(size) for size in info.shape], 0)
            self._made[key] = opset.broadcast(opset.constant(np.zeros((), np.float32), kind), sizes)
        return self._made[key]

    def _size(self, size: int | str) -> Any:
        if isinstance(size, int) or size not in self._sources:
            return opset.constant(np.array([size if isinstance(size, int) else 0], np.int64))
        if size not in self._made:
            parameter, axis = self._sources[size]
            shape = opset.shape_of(parameter, output_type="i64")
            self._made[size] = opset.gather(
                shape, opset.constant(np.array([axis], np.int64)), opset.constant(np.int64(0))
            )
        return self._made[size]
