"""From a traced program to an OpenVINO model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import attrs
import openvino as ov
import openvino.opset15 as opset
import torch
from torch.export.graph_signature import InputKind

from polyport.metadata import ExportMetadata
from polyport_dynamo.lowering import Leaves, Prepared, prepare, signature
from polyport_dynamo.lowering.facts import traced
from polyport_openvino.decoder import WEIGHT, element_type
from polyport_openvino.translate import Translator

Node = torch.fx.Node


@attrs.frozen(eq=False)
class Lowered:
    """A lowered program.

    Args:
        model: The model. Its ports are named by `leaves.graph_names()`.
        leaves: What goes in and out, which inputs a call changes and which it returns.
    """

    model: ov.Model
    leaves: Leaves


def lower_program(
    program: torch.export.ExportedProgram,
    *,
    input_names: Sequence[str],
    output_names: Sequence[str],
    stateful: bool = False,
) -> Lowered:
    """Lower a traced program. The program is not changed, and weights are shared with it, not copied.

    Args:
        program: As `torch.export.export` returns it.
        input_names: One per tensor that the caller passes, in the order of the flattened arguments.
        output_names: One per tensor among the flattened results; None and numbers have none.
        stateful: Whether caches that grow are going to be variables (see `polyport_openvino.stateful`).

    Raises:
        ValueError: Names do not fit the program, or results depend on state.
        UnsupportedOperator: An operator has no translation.
    """
    signature.check_names("input", input_names, len(signature.user_inputs(program)))
    signature.check_names("output", output_names, len(signature.user_outputs(program)))
    translator = Translator(stateful=stateful)
    prepared = prepare(program, translator)
    translator.check(prepared.graph)
    leaves = prepared.leaves(input_names, output_names, _origin)
    results = [*prepared.computed(leaves), *prepared.contents.values()]
    modules = dict(prepared.program.graph_module.named_children())
    model = translator.run(prepared.graph, prepared.inputs, results, _tensors(prepared), modules)
    return Lowered(_complete(model, leaves, prepared.inputs, results), leaves)


def _origin(node: Node) -> Node:
    """The node whose value a node hands on."""
    while node.target in _COPIES and isinstance(source := node.args[0], Node):
        before, after = source.meta.get("val"), node.meta.get("val")
        if (
            not isinstance(before, torch.Tensor)
            or not isinstance(after, torch.Tensor)
            or before.dtype != after.dtype
        ):
            break
        node = source
    return node


_COPIES = frozenset({
    torch.ops.aten.to.dtype, torch.ops.aten.to.device, torch.ops.aten.to.dtype_layout, torch.ops.aten._to_copy.default,
    torch.ops.aten.contiguous.default, torch.ops.aten.clone.default, torch.ops.aten.detach.default,
    torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default,
})  # fmt: skip


def _tensors(prepared: Prepared) -> dict[Node, torch.Tensor]:
    """The tensors of weights and constants, by node."""
    program = prepared.program
    found: dict[Node, torch.Tensor] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind in (InputKind.USER_INPUT, InputKind.TOKEN):
            continue
        placeholder = prepared.placeholders[spec.arg.name]
        if placeholder.users:
            found[placeholder] = signature.tensor_of(program, spec)
            placeholder.meta[WEIGHT] = spec.target
    buffers = dict(program.graph_module.named_buffers())
    for node in prepared.graph.find_nodes(op="get_attr"):
        if isinstance(tensor := buffers.get(node.target), torch.Tensor):
            found[node] = tensor
    return found


def _complete(model: ov.Model, leaves: Leaves, inputs: Sequence[Node], results: Sequence[Node]) -> ov.Model:
    """The model with a parameter for every input, ports named by the leaves, and results of the recorded types.

    The frontend leaves out parameters that nothing reads.
    """
    made = {
        name: parameter for parameter in model.get_parameters() for name in parameter.output(0).get_names()
    }
    taken, returned = leaves.graph_names()
    parameters = []
    for node, name in zip(inputs, taken, strict=True):
        parameter = made.get(node.name)
        if parameter is None:
            fake = traced(node)
            shape = [size if isinstance(size, int) else -1 for size in fake.shape]
            parameter = opset.parameter(shape, element_type(fake.dtype))
        parameter.set_friendly_name(name)
        parameters.append(parameter)
    seen: set[Any] = set()
    values = [
        _own_value(result.input_value(0), element_type(traced(node).dtype), seen)
        for result, node in zip(model.get_results(), results, strict=True)
    ]
    complete = ov.Model([opset.result(value) for value in values], parameters, "model")
    for port, name in zip((*complete.inputs, *complete.outputs), (*taken, *returned), strict=True):
        port.get_tensor().set_names({name})
    for result, name in zip(complete.get_results(), returned, strict=True):
        result.set_friendly_name(name)
    return complete


def _own_value(value: ov.Output, kind: ov.Type, seen: set[Any]) -> ov.Output:
    """The value of one result alone: a port can't have two names, and a parameter has its own.

    Args:
        value: What the graph computes.
        kind: The type that it shall have.
        seen: Values that are other results' already.
    """
    place = (value.get_node().get_friendly_name(), value.get_index())
    source = value.get_node().get_type_name()
    if value.get_element_type() == kind and place not in seen and source not in ("Parameter", "Constant"):
        seen.add(place)
        return value
    made: ov.Output = opset.convert(value, kind.get_type_name()).output(0)
    return made


def name_axes(model: ov.Model, leaves: Leaves, metadata: ExportMetadata) -> None:
    """Write the names of the axes into the layouts of the ports: `[batch,past_sequence,?]`.

    OpenVINO writes them in capitals, and some in its own way (`N` for a batch).

    Args:
        model: The model.
        leaves: Its leaves.
        metadata: The record of the leaves.
    """
    inputs, outputs = ({info.name: info for info in infos} for infos in (metadata.inputs, metadata.outputs))
    changed = [inputs[name] for name in leaves.in_place]
    returned = [*(outputs[name] for name in leaves.computed), *changed]
    for parameter, info in zip(model.get_parameters(), metadata.inputs, strict=True):
        parameter.set_layout(_layout(info.shape))
    for result, info in zip(model.get_results(), returned, strict=True):
        result.set_layout(_layout(info.shape))


def _layout(shape: Sequence[int | str]) -> ov.Layout:
    names: list[str] = []
    for size in shape:
        name = "" if isinstance(size, int) else re.sub(r"\W+", "_", size).strip("_")
        names.append(name if name and name not in names else "?")
    if not names:
        return ov.Layout()
    try:
        return ov.Layout(f"[{','.join(names)}]")
    except RuntimeError:  # two names that OpenVINO takes for one
        return ov.Layout(f"[{','.join('?' for _ in names)}]")
