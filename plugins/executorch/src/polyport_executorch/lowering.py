"""From a traced program to an ExecuTorch program."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from polyport.errors import ExportError
from polyport.metadata import ExportMetadata
from polyport_dynamo.lowering import Leaves, prepare
from polyport_dynamo.lowering.facts import dims
from polyport_executorch import portable
from polyport_executorch.building import Builder
from polyport_executorch.config import ExecutorchConfig
from polyport_executorch.methods import METHOD, STATE
from polyport_executorch.portable import given_to, is_copy
from polyport_executorch.programs import contents, functional
from polyport_executorch.ranges import exactly, narrowed, settle
from polyport_executorch.recipes import Recipe
from polyport_executorch.sizes import read_from_sizes, without_powers
from polyport_executorch.stateful import make_stateful, state_program
from polyport_executorch.weights import file_options

Node = torch.fx.Node


@attrs.frozen(eq=False)
class Lowered:
    """A lowered program.

    Args:
        manager: `executorch.exir.ExecutorchProgramManager`.
        edge: Its graph before memory was planned, with calls of delegates (`torch.export.ExportedProgram`).
        leaves: What goes in and out, which inputs a call changes and which it returns.
        kept: The leaves that the program keeps, if any.
    """

    manager: Any
    edge: Any
    leaves: Leaves
    kept: tuple[str, ...] = ()


class _Everything:
    """ExecuTorch's own lowering decomposes."""

    def known(self, node: Node) -> bool:
        del node
        return True

    def translates(self, target: Any) -> bool:
        del target
        return True


def lower_program(
    program: torch.export.ExportedProgram,
    metadata: ExportMetadata,
    *,
    recipe: Recipe,
    config: ExecutorchConfig,
    inputs: Mapping[str, torch.Tensor],
) -> Lowered:
    """Lower a traced program, which is not changed.

    Args:
        program: As `torch.export.export` returns it.
        metadata: Its record, in which all axes are bounded.
        recipe: What is delegated.
        config: How memory is planned.
        inputs: Leaf -> the tensor that was traced with.
    """
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    from polyport_executorch.passes import RowByRow, write_in_place

    prepared = prepare(program, _Everything())
    leaves = prepared.leaves(metadata.input_names, metadata.output_names, _value)
    results = [*prepared.computed(leaves), *prepared.contents.values()]
    results = _apart(prepared.graph, results)
    _tidy(prepared.graph)
    with narrowed(metadata, inputs) as largest, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        builder = Builder(prepared.graph, prepared.inputs, contents(prepared))
        state = make_stateful(builder, metadata, leaves, results) if config.stateful else None
        read_from_sizes(builder)
        portable.rewrite(builder)
        recipe.rewrite(builder)
        settle(metadata, inputs, prepared.graph.find_nodes(op="placeholder"))
        programs = {METHOD: functional(prepared, builder.constants, state, largest)}
        if state is not None:
            programs[STATE] = state_program(state)
        varying = _varying(programs[METHOD])
        edge = to_edge_transform_and_lower(
            programs,
            transform_passes=[RowByRow(), *recipe.passes()],
            partitioner=list(recipe.partitioners()),
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        lowered = edge.exported_program(METHOD)
        _refuse_fixed(varying, _varying(lowered))
        without_powers(lowered.graph_module)
        write_in_place(lowered)
        exactly(inputs, largest)
        manager = edge.to_executorch(_backend_config(config, shared=state is not None))
    return Lowered(manager, lowered, leaves, state.leaves if state else ())


def _apart(graph: torch.fx.Graph, results: list[Node]) -> list[Node]:
    """Give each result memory of its own: what is an input, a weight or another result besides is copied."""
    found: list[Node] = []
    for result in results:
        source = result
        while is_copy(source):
            source = given_to(source)
        if source.op == "placeholder" or source in found:
            with graph.inserting_before(graph.output_node()):
                copied = graph.call_function(torch.ops.aten.clone.default, (source,))
            copied.meta.update(source.meta)
            source = copied
        found.append(source)
    graph.output_node().args = (tuple(found),)
    return found


def _value(node: Node) -> Node:
    """What a node is another name of."""
    while node.target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
        source: Any = node.args[0]
        node = source
    return node


def _varying(program: torch.export.ExportedProgram) -> dict[str, int]:
    """Placeholder -> how many of its sizes vary."""
    return {
        node.name: sum(not isinstance(size, int) for size in dims(node))
        for node in program.graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("val"), torch.Tensor)
    }


def _refuse_fixed(before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """Refuse a program in which ExecuTorch has taken a size of the sample for the only one.

    Raises:
        ExportError: Names the inputs.
    """
    fixed = [name for name, count in after.items() if count < before.get(name, 0)]
    if fixed:
        raise ExportError(
            f"ExecuTorch's passes have fixed sizes of {', '.join(fixed)} to those of the sample.",
            stage="lower",
            backend="executorch",
        )


def _tidy(graph: torch.fx.Graph) -> None:
    """What ExecuTorch makes of a graph shall follow from its operators alone.

    Views become reshapes: what an operator is decomposed into may lay out its result otherwise than the operator did. And nodes forget which
    function of Python they come from: what ExecuTorch takes for a linear layer by that alone may be a product of batches.
    """
    for node in graph.nodes:
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default
        for key in ("source_fn_stack", "torch_fn"):
            node.meta.pop(key, None)


def _backend_config(config: ExecutorchConfig, *, shared: bool) -> Any:
    from executorch.exir import ExecutorchBackendConfig

    from polyport_executorch.passes import LargestSizes, PlanOnce

    return ExecutorchBackendConfig(
        sym_shape_eval_pass=LargestSizes(),
        memory_planning_pass=PlanOnce(
            alloc_graph_input=config.alloc_graph_input,
            alloc_graph_output=config.alloc_graph_output,
            alloc_mutable_buffers=config.alloc_mutable_buffers,
            share_mutable_buffers=shared,
        ),
        **file_options(),
    )
