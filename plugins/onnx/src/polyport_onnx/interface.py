"""Inputs, weights and outputs of the ONNX graph, from the signature of the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch.export.graph_signature import InputKind

from polyport_dynamo.lowering import signature
from polyport_onnx import torch_internals
from polyport_onnx.context import Context

Node = torch.fx.Node


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
        tensor = signature.tensor_of(program, spec)
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
