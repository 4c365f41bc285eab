"""Inputs, weights and outputs of a traced program, from its signature."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind, TensorArgument

from polyport_dynamo.lowering.functionalize import share_memory

Node = torch.fx.Node


def user_inputs(program: torch.export.ExportedProgram) -> list[str]:
    """Placeholders of the tensors that a caller passes.

    Raises:
        ValueError: the program takes a number or object whose value is not fixed.
    """
    found = []
    for spec in program.graph_signature.input_specs:
        if spec.kind != InputKind.USER_INPUT or isinstance(spec.arg, ConstantArgument):
            continue
        if not isinstance(spec.arg, TensorArgument):
            raise ValueError(f"the input {spec.arg.name} is no tensor ({type(spec.arg).__name__})")
        found.append(spec.arg.name)
    return found


def user_outputs(program: torch.export.ExportedProgram) -> list[int]:
    """Positions, in the graph's results, of the tensors that a caller gets."""
    return [
        index
        for index, spec in enumerate(program.graph_signature.output_specs)
        if spec.kind == OutputKind.USER_OUTPUT and isinstance(spec.arg, TensorArgument)
    ]


def results(program: torch.export.ExportedProgram, graph: torch.fx.Graph) -> list[Node]:
    """The nodes whose values a caller gets as tensors."""
    found: Any = graph.output_node().args[0]
    return [found[index] for index in user_outputs(program)]


def mutated_inputs(program: torch.export.ExportedProgram, graph: torch.fx.Graph) -> dict[str, Node]:
    """What a functional program says itself: placeholder of a changed user input -> the node of its final content."""
    found: Any = graph.output_node().args[0]
    return {
        str(spec.target): found[index]
        for index, spec in enumerate(program.graph_signature.output_specs)
        if spec.kind == OutputKind.USER_INPUT_MUTATION
    }


def keep(graph: torch.fx.Graph, nodes: Iterable[Node]) -> None:
    """Add nodes to the results, behind those of the program, so that no later step drops them or loses their place."""
    output = graph.output_node()
    found: Any = output.args[0]
    output.args = ((*found, *nodes),)


def kept(program: torch.export.ExportedProgram, graph: torch.fx.Graph) -> list[Node]:
    """What became of the nodes that were given to `keep`."""
    found: Any = graph.output_node().args[0]
    return list(found[len(program.graph_signature.output_specs) :])


def check_names(kind: str, names: Sequence[str], count: int) -> None:
    """Raise ValueError unless there are `count` different names."""
    if len(names) != count:
        raise ValueError(
            f"the program has {count} tensor {kind}s, but {len(names)} names were given: {list(names)}"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{kind} names must differ; given twice: {twice}")


def placeholders_of(program: torch.export.ExportedProgram, graph: torch.fx.Graph) -> dict[str, torch.fx.Node]:
    """The placeholders of a copied graph by their names in the program: copying renames some (`input`, a builtin)."""
    originals = program.graph.find_nodes(op="placeholder")
    return {node.name: new for node, new in zip(originals, graph.find_nodes(op="placeholder"), strict=True)}


def tensor_of(program: torch.export.ExportedProgram, spec: InputSpec) -> torch.Tensor:
    """The tensor of a parameter, buffer or constant."""
    target = spec.target
    if target is not None:
        if target in program.state_dict:
            found: Any = program.state_dict[target]
        else:
            found = program.constants.get(target)
        if isinstance(found, torch.Tensor):
            return found
    raise ValueError(f"the input {spec.arg.name} of kind {spec.kind.name} is no tensor")


def passed_through(
    results: Sequence[Node],
    placeholders: Sequence[Node],
    contents: Mapping[int, Node],
    value: Callable[[Node], Any],
) -> dict[int, int]:
    """Results that are an input's own tensor: index of the result -> index of the input.

    Args:
        results: what the model returns.
        placeholders: of the inputs.
        contents: index of an input that the program changes -> the node of its final content.
        value: node -> what nodes of equal values have in common.
    """
    present = {index: contents.get(index, placeholder) for index, placeholder in enumerate(placeholders)}
    owner = {value(node): index for index, node in present.items()}
    found = {}
    for position, result in enumerate(results):
        index = owner.get(value(result))
        # equal content is not enough: a model that returns a copy keeps what the next call would write over
        if index is not None and (result is present[index] or share_memory(placeholders[index], result)):
            found[position] = index
    return found
