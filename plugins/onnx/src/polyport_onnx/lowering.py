"""From a traced program to an ONNX model.

torch.onnx decomposes the whole program into core operators, which runs all of it again over fake tensors, and then
translates. Here operators are translated as they are, and only those without a translation are decomposed, one by one.
Where that is not provably right, `torch.export`'s own pass over the whole program is the way back.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch
from torch.export.graph_signature import InputKind

from polyport_onnx import interface, torch_internals
from polyport_onnx.context import Context
from polyport_onnx.decompose import decompose, remove_dead
from polyport_onnx.emit import Emitter
from polyport_onnx.functionalize import NotLocal, functionalize
from polyport_onnx.naming import AxisNames, make_unique
from polyport_onnx.opset import adapt
from polyport_onnx.optimize import inline_functions, optimize_model
from polyport_onnx.translate import Translator

logger = logging.getLogger(__name__)

DEFAULT_OPSET = 20
_IR_VERSIONS = {18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11}


def lower_program(
    program: torch.export.ExportedProgram,
    *,
    input_names: Sequence[str],
    output_names: Sequence[str],
    axes: Mapping[str, Mapping[int, str]],
    opset_version: int | None = None,
    optimize: bool = True,
) -> ir.Model:
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
        A model whose inputs and outputs have exactly the given names.

    Raises:
        ValueError: names do not fit the program, the opset is not supported, or the program changes one of its inputs.
        UnsupportedOperator: an operator has no translation.
    """
    opset = DEFAULT_OPSET if opset_version is None else opset_version
    if not torch_internals.MIN_OPSET <= opset <= torch_internals.MAX_OPSET:
        allowed = f"{torch_internals.MIN_OPSET} to {torch_internals.MAX_OPSET}"
        raise ValueError(f"opset {opset} is not supported; choose one of {allowed}")
    interface.check_names("input", input_names, len(interface.user_inputs(program)))
    interface.check_names("output", output_names, len(interface.user_outputs(program)))
    names = AxisNames()
    translator = Translator(opset, names)
    program, graph, changed = prepare(program, translator)
    refuse_mutations(program, graph, changed)
    model = build(program, graph, translator, input_names, output_names, axes)
    inline_functions(model)
    adapt(model, opset)
    if optimize:
        optimize_model(model)
    make_unique(model.graph, {*input_names, *output_names, *model.graph.initializers})
    return model


def prepare(
    program: torch.export.ExportedProgram, translator: Translator
) -> tuple[torch.export.ExportedProgram, torch.fx.Graph, dict[str, torch.fx.Node]]:
    """A graph that is functional and has operators with translations only.

    Returns:
        The program the graph belongs to, the graph, and for inputs which the program changes their final content.

    Raises:
        UnsupportedOperator: an operator has neither a translation nor a decomposition.
    """
    graph = copy.deepcopy(program.graph)
    try:
        changed = functionalize(graph)
        remove_dead(graph)
        decompose(graph, translator.known)
        remove_dead(graph)
    except NotLocal as reason:
        logger.info("decomposing the whole program, since %s", reason)
        program = decompose_whole(program, translator)
        graph = copy.deepcopy(program.graph)
        changed = {}
        remove_dead(graph)
        decompose(graph, translator.known)
        remove_dead(graph)
    translator.check(graph)
    names = {copied: name for name, copied in placeholders_of(program, graph).items()}
    return program, graph, {names[node]: content for node, content in changed.items()}


def placeholders_of(program: torch.export.ExportedProgram, graph: torch.fx.Graph) -> dict[str, torch.fx.Node]:
    """The placeholders of a copied graph by their names in the program: copying renames some (`input`, a builtin)."""
    originals = program.graph.find_nodes(op="placeholder")
    return {node.name: new for node, new in zip(originals, graph.find_nodes(op="placeholder"), strict=True)}


def decompose_whole(
    program: torch.export.ExportedProgram, translator: Translator
) -> torch.export.ExportedProgram:
    """Torch's own pass over the whole program, for operators that have no translation."""
    table = {
        target: function
        for target, function in torch_internals.default_decompositions().items()
        if not translator.translates(target)
    }
    whole: torch.export.ExportedProgram = program.run_decompositions(table)
    return whole


def refuse_mutations(
    program: torch.export.ExportedProgram, graph: torch.fx.Graph, changed: Mapping[str, torch.fx.Node]
) -> None:
    """Refuse a program whose calls depend on earlier ones: an ONNX graph keeps no state.

    A buffer that is changed but has no part in the results (a counter of batches) may change unseen.

    Raises:
        ValueError: an input, or a buffer that the results depend on, is changed in place.
    """
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")}
    by_target = {spec.target: name for name, spec in specs.items() if spec.target is not None}
    signature = program.graph_signature
    names = [*changed, *signature.user_inputs_to_mutate.values()]
    names += [by_target[target] for target in signature.buffers_to_mutate.values()]
    if not names:
        return
    reached: set[torch.fx.Node] = set()
    waiting = interface.results(program, graph)
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting.extend(node.all_input_nodes)
    used = {name for name, node in placeholders_of(program, graph).items() if node in reached}
    for name in names:
        spec = specs[name]
        if spec.kind == InputKind.USER_INPUT:
            raise ValueError(f"the program changes its input {name} in place, which an ONNX graph cannot do")
        if name in used:
            raise ValueError(
                f"the results depend on the buffer {spec.target}, which the program changes in place"
            )


def build(
    program: torch.export.ExportedProgram,
    graph: torch.fx.Graph,
    translator: Translator,
    input_names: Sequence[str],
    output_names: Sequence[str],
    axes: Mapping[str, Mapping[int, str]],
) -> ir.Model:
    """Translate the prepared graph and give the model its interface. See `lower_program` for the arguments."""
    opset = translator.opset_version
    context = Context(Emitter(opset), translator.names)
    placeholders = placeholders_of(program, graph)
    inputs = interface.add_inputs(
        context, [placeholders[name] for name in interface.user_inputs(program)], input_names, axes
    )
    weights = interface.add_weights(context, program, placeholders, {*input_names, *output_names})
    modules = dict(program.graph_module.named_children()) | dict(program.graph_module.named_buffers())
    translator.run(graph, context, modules)
    outputs = interface.add_outputs(context, interface.results(program, graph), output_names)
    emit = context.emit
    onnx_graph = ir.Graph(
        inputs, outputs, nodes=emit.nodes, initializers=[*weights.values(), *emit.initializers],
        opset_imports={"": opset}, name="polyport",
    )  # fmt: skip
    for domain in {function.domain for function in emit.functions.values()}:
        onnx_graph.opset_imports[domain] = 1
    return ir.Model(
        onnx_graph,
        ir_version=_IR_VERSIONS[opset],
        producer_name="polyport",
        functions=list(emit.functions.values()),
    )
