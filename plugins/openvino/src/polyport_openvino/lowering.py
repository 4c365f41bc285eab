"""From a traced program to an OpenVINO model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import openvino as ov
import torch
from torch.export.graph_signature import InputKind

from polyport_dynamo.lowering import Leaves, Prepared, prepare, signature
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
    program: torch.export.ExportedProgram, *, input_names: Sequence[str], output_names: Sequence[str]
) -> Lowered:
    """Lower a traced program. The program is not changed, and weights are shared with it, not copied.

    Args:
        program: As `torch.export.export` returns it.
        input_names: One per tensor that the caller passes, in the order of the flattened arguments.
        output_names: One per tensor among the flattened results; None and numbers have none.

    Raises:
        ValueError: Names do not fit the program, or results depend on state.
        UnsupportedOperator: An operator has no translation.
    """
    signature.check_names("input", input_names, len(signature.user_inputs(program)))
    signature.check_names("output", output_names, len(signature.user_outputs(program)))
    translator = Translator()
    prepared = prepare(program, translator)
    translator.check(prepared.graph)
    passed = signature.passed_through(prepared.results, prepared.inputs, prepared.contents, _origin)
    leaves = Leaves(
        inputs=tuple(input_names),
        outputs=tuple(output_names),
        in_place=tuple(input_names[i] for i in prepared.contents),
        passed_through={output_names[i]: input_names[source] for i, source in passed.items()},
    )
    computed = [result for i, result in enumerate(prepared.results) if i not in passed]
    results = [*computed, *prepared.contents.values()]
    model = translator.run(prepared.graph, prepared.inputs, results, _tensors(prepared))
    _name_ports(model, leaves, results)
    return Lowered(model, leaves)


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
    buffers = dict(program.graph_module.named_buffers())
    for node in prepared.graph.find_nodes(op="get_attr"):
        if isinstance(tensor := buffers.get(node.target), torch.Tensor):
            found[node] = tensor
    return found


def _name_ports(model: ov.Model, leaves: Leaves, results: Sequence[Node]) -> None:
    """Give the ports the names of the leaves, and the results the types that the tracer recorded."""
    from polyport_openvino.decoder import element_type

    inputs, outputs = leaves.graph_names()
    for parameter, name in zip(model.get_parameters(), inputs, strict=True):
        parameter.set_friendly_name(name)
        parameter.output(0).get_tensor().set_names({name})
    taken: set[Any] = set()
    for result, node, name in zip(model.get_results(), results, outputs, strict=True):
        value = result.input_value(0)
        kind = element_type(node.meta["val"].dtype)
        place = (value.get_node().get_friendly_name(), value.get_index())
        if value.get_element_type() != kind:
            value = ov.opset15.convert(value, kind.get_type_name()).output(0)
        elif place in taken or value.get_node().get_type_name() in ("Parameter", "Constant"):
            value = ov.opset15.convert(value, kind.get_type_name()).output(0)
        else:
            taken.add(place)
        result.input(0).replace_source_output(value)
        result.set_friendly_name(name)
        value.get_tensor().set_names({name})
    model.validate_nodes_and_infer_types()
