"""From a traced program to an ONNX model.

torch.onnx decomposes the whole program into core operators, which runs all of it again over fake tensors, and then
translates. Here operators are translated as they are, and only those without a translation are decomposed, one by one.
Where that is not provably right, `torch.export`'s own pass over the whole program is the way back.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence

import attrs
import onnx_ir as ir
import torch

from polyport_onnx import interface, torch_internals
from polyport_onnx.context import Context
from polyport_onnx.decompose import decompose, remove_dead
from polyport_onnx.emit import Emitter
from polyport_onnx.functionalize import NotLocal, functionalize
from polyport_onnx.leaves import Leaves
from polyport_onnx.naming import AxisNames, make_unique
from polyport_onnx.opset import adapt
from polyport_onnx.optimize import inline_functions, optimize_model
from polyport_onnx.translate import Translator

logger = logging.getLogger(__name__)

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
    interface.check_names("input", input_names, len(interface.user_inputs(program)))
    interface.check_names("output", output_names, len(interface.user_outputs(program)))
    names = AxisNames()
    translator = Translator(opset, names)
    program, graph, changed = prepare(program, translator)
    refuse_state(program, graph, changed)
    model, leaves = build(program, graph, translator, input_names, output_names, axes, changed)
    inline_functions(model)
    adapt(model, opset)
    if optimize:
        optimize_model(model)
    interface_names = (value.name for value in (*model.graph.inputs, *model.graph.outputs))
    make_unique(model.graph, {*(name for name in interface_names if name), *model.graph.initializers})
    return Lowered(model, leaves)


def prepare(
    program: torch.export.ExportedProgram, translator: Translator
) -> tuple[torch.export.ExportedProgram, torch.fx.Graph, dict[str, torch.fx.Node | None]]:
    """A graph that is functional and has operators with translations only.

    Returns:
        The program the graph belongs to, the graph, and the placeholders of what the program changes: user inputs with
        the node of their final content, buffers with None.

    Raises:
        UnsupportedOperator: an operator has neither a translation nor a decomposition.
    """
    graph = copy.deepcopy(program.graph)
    try:
        names = {copied: name for name, copied in placeholders_of(program, graph).items()}
        changed = {names[node]: content for node, content in functionalize(graph).items()}
        inputs = _expand(program, graph, translator, changed)
    except NotLocal as reason:
        logger.info("decomposing the whole program, since %s", reason)
        program = decompose_whole(program, translator)
        graph = copy.deepcopy(program.graph)
        changed = interface.mutated_inputs(program, graph)
        inputs = _expand(program, graph, translator, changed)
    translator.check(graph)
    return program, graph, {name: inputs.get(name) for name in [*changed, *_changed_buffers(program)]}


def _expand(
    program: torch.export.ExportedProgram,
    graph: torch.fx.Graph,
    translator: Translator,
    changed: Mapping[str, torch.fx.Node],
) -> dict[str, torch.fx.Node]:
    """Decompose what has no translation; the final contents of user inputs are returned and stay in the graph."""
    inputs = [name for name in interface.user_inputs(program) if name in changed]
    interface.keep(graph, [changed[name] for name in inputs])
    remove_dead(graph)
    decompose(graph, translator.known)
    remove_dead(graph)
    return dict(zip(inputs, interface.kept(program, graph), strict=True))


def _changed_buffers(program: torch.export.ExportedProgram) -> list[str]:
    """Placeholders of the buffers that a functional program says it changes."""
    signature = program.graph_signature
    changed = set(signature.buffers_to_mutate.values())
    return [name for name, target in signature.inputs_to_buffers.items() if target in changed]


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


def refuse_state(
    program: torch.export.ExportedProgram,
    graph: torch.fx.Graph,
    changed: Mapping[str, torch.fx.Node | None],
) -> None:
    """Refuse a program whose calls depend on earlier ones: an ONNX graph keeps no state of its own.

    A buffer that is changed but has no part in the results (a counter of batches) may change unseen.

    Raises:
        ValueError: a buffer that the results depend on is changed in place.
    """
    buffers = [name for name, content in changed.items() if content is None]
    if not buffers:
        return
    reached: set[torch.fx.Node] = set()
    waiting = [*interface.results(program, graph), *interface.kept(program, graph)]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting.extend(node.all_input_nodes)
    placeholders = placeholders_of(program, graph)
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")}
    for name in buffers:
        if placeholders[name] in reached:
            raise ValueError(
                f"the results depend on the buffer {specs[name].target}, which the program changes in place"
            )


def build(
    program: torch.export.ExportedProgram,
    graph: torch.fx.Graph,
    translator: Translator,
    input_names: Sequence[str],
    output_names: Sequence[str],
    axes: Mapping[str, Mapping[int, str]],
    changed: Mapping[str, torch.fx.Node | None],
) -> tuple[ir.Model, Leaves]:
    """Translate the prepared graph and give the model its interface. See `lower_program` and `prepare`."""
    opset = translator.opset_version
    context = Context(Emitter(opset), translator.names)
    placeholders = placeholders_of(program, graph)
    sources = interface.user_inputs(program)
    given = [placeholders[name] for name in sources]
    inputs = interface.add_inputs(context, given, input_names, axes)
    weights = interface.add_weights(context, program, placeholders, {*input_names, *output_names})
    modules = dict(program.graph_module.named_children()) | dict(program.graph_module.named_buffers())
    translator.run(graph, context, modules)
    contents = {i: node for i, name in enumerate(sources) if (node := changed.get(name)) is not None}
    results = interface.results(program, graph)
    passed = interface.passed_through(context, results, given, contents)
    leaves = Leaves(
        inputs=tuple(input_names),
        outputs=tuple(output_names),
        in_place=tuple(input_names[i] for i in contents),
        passed_through={output_names[i]: input_names[source] for i, source in passed.items()},
    )
    computed = [result for i, result in enumerate(results) if i not in passed]
    # the contents first: each takes the value itself, so that it can be computed where the input lies
    made = interface.add_outputs(context, [*contents.values(), *computed])
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
