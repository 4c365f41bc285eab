"""From a traced program to an ONNX model.

torch.onnx decomposes the whole program into core operators, which runs all of it again over fake tensors, and then
translates. Here operators are translated as they are, and only those without a translation are decomposed, one by one.
Where that is not provably right, `torch.export`'s own pass over the whole program is the way back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import onnx_ir as ir
import torch

from polyport_dynamo.lowering import Leaves, Prepared, prepare, signature
from polyport_onnx import interface, torch_internals
from polyport_onnx.context import Context
from polyport_onnx.emit import Emitter
from polyport_onnx.naming import AxisNames, make_unique
from polyport_onnx.opset import adapt
from polyport_onnx.optimize import inline_functions, optimize_model
from polyport_onnx.translate import Translator

DEFAULT_OPSET = 20
_IR_VERSIONS = {18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11}


@attrs.frozen(eq=False)
class Lowered:
    """A lowered program.

    Args:
        model: The model. Its inputs and outputs are named by `leaves.graph_names()`.
        leaves: What goes in and out, which inputs a call changes and which it returns.
    """

    model: ir.Model
    leaves: Leaves


def lower_program(
    program: torch.export.ExportedProgram,
    *,
    input_names: Sequence[str],
    output_names: Sequence[str],
    axes: Mapping[str, Mapping[int, str]],
    opset_version: int | None = None,
    optimize: bool = True,
) -> Lowered:
    """Lower a traced program to ONNX. The program is not changed, and weights are shared with it, not copied.

    Args:
        program: as `torch.export.export` returns it.
        input_names: one per tensor that the caller passes, in the order of the flattened arguments.
        output_names: one per tensor among the flattened results; None and numbers have none.
        axes: input name to dimension to axis name (`{"input_ids": {0: "batch", 1: "sequence"}}`). Sizes of outputs are
            written in these names.
        opset_version: 18 to 23; 20 by default, the newest whose operators ONNX Runtime's own fusions all recognise.
        optimize: remove unused and repeated nodes.

    Returns:
        The model, and how its inputs and outputs belong to the given names: they are these names, unless one is on both
        sides, an output is an input's own tensor, or the program changes an input.

    Raises:
        ValueError: names do not fit the program, the opset is not supported, or results depend on state.
        UnsupportedOperator: an operator has no translation.
    """
    opset = DEFAULT_OPSET if opset_version is None else opset_version
    if not torch_internals.MIN_OPSET <= opset <= torch_internals.MAX_OPSET:
        allowed = f"{torch_internals.MIN_OPSET} to {torch_internals.MAX_OPSET}"
        raise ValueError(f"opset {opset} is not supported; choose one of {allowed}")
    signature.check_names("input", input_names, len(signature.user_inputs(program)))
    signature.check_names("output", output_names, len(signature.user_outputs(program)))
    names = AxisNames()
    translator = Translator(opset, names)
    prepared = prepare(program, translator)
    translator.check(prepared.graph)
    model, leaves = build(prepared, translator, input_names, output_names, axes)
    inline_functions(model)
    adapt(model, opset)
    if optimize:
        optimize_model(model)
    interface_names = (value.name for value in (*model.graph.inputs, *model.graph.outputs))
    make_unique(model.graph, {*(name for name in interface_names if name), *model.graph.initializers})
    return Lowered(model, leaves)


def build(
    prepared: Prepared,
    translator: Translator,
    input_names: Sequence[str],
    output_names: Sequence[str],
    axes: Mapping[str, Mapping[int, str]],
) -> tuple[ir.Model, Leaves]:
    """Translate the prepared graph and give the model its interface. See `lower_program`."""
    opset = translator.opset_version
    context = Context(Emitter(opset), translator.names)
    program, contents = prepared.program, prepared.contents
    inputs = interface.add_inputs(context, prepared.inputs, input_names, axes)
    weights = interface.add_weights(context, program, prepared.placeholders, {*input_names, *output_names})
    modules = dict(program.graph_module.named_children()) | dict(program.graph_module.named_buffers())
    translator.run(prepared.graph, context, modules)
    leaves = prepared.leaves(input_names, output_names, lambda node: id(context.value(node)))
    # the contents first: each takes the value itself, so that it can be computed where the input lies
    made = interface.add_outputs(context, [*contents.values(), *prepared.computed(leaves)])
    outputs = [*made[len(contents) :], *made[: len(contents)]]
    for values, names in zip((inputs, outputs), leaves.graph_names(), strict=True):
        for value, name in zip(values, names, strict=True):
            value.name = name
    emit = context.emit
    onnx_graph = ir.Graph(
        inputs, outputs, nodes=emit.nodes, initializers=[*weights.values(), *emit.initializers],
        opset_imports={"": opset}, name="polyport",
    )  # fmt: skip
    for domain in {function.domain for function in emit.functions.values()}:
        onnx_graph.opset_imports[domain] = 1
    model = ir.Model(
        onnx_graph,
        ir_version=_IR_VERSIONS[opset],
        producer_name="polyport",
        functions=list(emit.functions.values()),
    )
    return model, leaves
