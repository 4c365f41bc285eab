"""Inputs, weights and outputs of the ONNX graph, from the signature of the program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind, TensorArgument

from polyport_onnx import torch_internals
from polyport_onnx.context import Context
from polyport_onnx.functionalize import share_memory

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


def add_inputs(
    context: Context,
    placeholders: Sequence[Node],
    names: Sequence[str],
    axes: Mapping[str, Mapping[int, str]],
) -> list[ir.Value]:
    """Make the graph inputs, and learn the names of their axes.

    Raises:
        ValueError: `axes` names an input that does not exist.
    """
    unknown = sorted(set(axes) - set(names))
    if unknown:
        raise ValueError(f"axes are given for {unknown}, which are no inputs; the inputs are {list(names)}")
    for placeholder, name in zip(placeholders, names, strict=True):
        context.names.learn(name, placeholder.meta["val"], axes.get(name, {}))
    for placeholder, name in zip(placeholders, names, strict=True):
        context.names.learn_unnamed(name, placeholder.meta["val"])
    made = []
    for placeholder, name in zip(placeholders, names, strict=True):
        value = context.values[placeholder] = torch_internals.new_value(context.emit.opset, name)
        context.set_type(value, placeholder.meta["val"])
        context.learn_sizes(value, placeholder.meta["val"])
        context.user_inputs.add(placeholder)
        made.append(value)
    return made


def add_weights(
    context: Context, program: torch.export.ExportedProgram, placeholders: Mapping[str, Node], taken: set[str]
) -> dict[str, ir.Value]:
    """Make the initializers. They share memory with the program's tensors; tied weights are one initializer.

    Args:
        context: receives the values.
        program: has the tensors.
        placeholders: of the graph, by name; those that are missing or unused need no initializer.
        taken: names of inputs and outputs, which come first.
    """
    made: dict[str, ir.Value] = {}
    by_memory: dict[Any, ir.Value] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT or spec.kind == InputKind.TOKEN:
            continue
        placeholder = placeholders.get(spec.arg.name)
        if placeholder is None or not placeholder.users:
            continue
        tensor = _tensor(program, spec)
        key = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        )
        value = by_memory.get(key) if tensor.numel() else None
        if value is None:
            name = spec.target or spec.arg.name
            while name in taken or name in made:
                name = f"{name}_weight"
            value = torch_internals.new_value(context.emit.opset, name)
            context.set_type(value, tensor)
            stored = torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor
            value.const_value = ir.tensor_adapters.TorchTensor(stored.detach(), name=name)
            made[name] = by_memory[key] = value
        context.values[placeholder] = value
    return made


def _tensor(program: torch.export.ExportedProgram, spec: InputSpec) -> torch.Tensor:
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
    context: Context, results: Sequence[Node], placeholders: Sequence[Node], contents: Mapping[int, Node]
) -> dict[int, int]:
    """Results that are an input's own tensor: index of the result -> index of the input.

    Args:
        context: has the values.
        results: what the model returns.
        placeholders: of the inputs.
        contents: index of an input that the program changes -> the node of its final content.
    """
    present = {index: contents.get(index, placeholder) for index, placeholder in enumerate(placeholders)}
    owner = {id(context.value(node)): index for index, node in present.items()}
    found = {}
    for position, result in enumerate(results):
        index = owner.get(id(context.value(result)))
        # equal content is not enough: a model that returns a copy keeps what the next call would write over
        if index is not None and (result is present[index] or share_memory(placeholders[index], result)):
            found[position] = index
    return found


def add_outputs(context: Context, results: Sequence[Node]) -> list[ir.Value]:
    """Make the graph outputs. A result that is an input, a weight or another output too gets a node of its own."""
    made: list[ir.Value] = []
    used: set[int] = set()
    context.emit.scope = ""
    for result in results:
        value = context.value(result)
        if value.producer() is None or id(value) in used:
            copy = torch_internals.new_value(context.emit.opset)
            context.set_type(copy, result.meta["val"])
            context.emit.append(
                ir.Node("", "Identity", [value], outputs=[copy], version=context.emit.opset_version)
            )
            value = copy
        used.add(id(value))
        # The declared shape is the traced one also where a translation passed on a value of its own.
        context.set_type(value, result.meta["val"])
        made.append(value)
    return made
