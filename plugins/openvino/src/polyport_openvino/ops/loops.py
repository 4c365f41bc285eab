"""Loops over the slices of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openvino as ov
import torch

from polyport_openvino.context import Context
from polyport_openvino.ops.table import translates

Node = torch.fx.Node


@translates(torch.ops.higher_order.scan)
def scan(c: Context, node: Node, combine_fn: Node, init: Sequence[Node], xs: Sequence[Node],
         additional_inputs: Sequence[Node] = ()) -> Any:  # fmt: skip
    """A function called with what it carries on and the next slices of axis 0, as often as there are slices.

    Returns:
        What is carried on at the end, and each call's other results along a new axis 0.
    """
    del node
    body, names = c.body(combine_fn)
    carried, slices = len(init), len(xs)
    first = c.constant(0, torch.int64)
    made = {
        name: parameter for parameter in body.get_parameters() for name in parameter.output(0).get_names()
    }
    parameters = [made.get(name) for name in names]  # the frontend leaves out those that nothing reads
    for index, parameter in enumerate(parameters):
        if parameter is None or not carried <= index < carried + slices:
            continue
        # the runtime hands a slice of length 1 to the body
        taken = ov.opset15.parameter([1, *parameter.get_partial_shape()], parameter.get_element_type())
        dropped = c.op("squeeze", taken, first)
        for reader in parameter.output(0).get_target_inputs():
            reader.replace_source_output(dropped)
        parameters[index] = taken
    outputs = []
    for index, result in enumerate(body.get_results()):
        value = result.input_value(0)
        outputs.append(value if index < carried else c.op("unsqueeze", value, first))
    loop = ov.opset15.tensor_iterator()
    loop.set_body(
        ov.Model(
            [ov.opset15.result(output) for output in outputs],
            [found for found in parameters if found is not None],
        )
    )
    for index, source in enumerate((*init, *xs, *additional_inputs)):
        value, parameter = c.tensor(source), parameters[index]
        if parameter is None:
            continue
        if index < carried:
            loop.set_merged_input(parameter, value, outputs[index])
        elif index < carried + slices:
            loop.set_sliced_input(parameter, value, 0, 1, 1, -1, 0)
        else:
            loop.set_invariant_input(parameter, value)
    last = [loop.get_iter_value(output, -1) for output in outputs[:carried]]
    stacked = [loop.get_concatenated_slices(output, 0, 1, 1, -1, 0) for output in outputs[carried:]]
    return [*last, *stacked]
