"""A prepared graph as a program that ExecuTorch takes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils._sympy.value_ranges import ValueRanges

from polyport_dynamo.lowering import Prepared, signature
from polyport_executorch.stateful import State

Node = torch.fx.Node


class _Functional(torch.export.ExportedProgram):
    """A program that changes nothing in place. ExecuTorch's lowering first lets torch make it so, which traces the whole graph anew."""

    def run_decompositions(
        self, decomp_table: dict[Any, Any] | None = None, **options: Any
    ) -> torch.export.ExportedProgram:
        """Decompose operators; a table without any is no reason to trace.

        Args:
            decomp_table: Operator -> how to compute it.
            options: As torch takes them.
        """
        # torch's own table is filled when it is first asked, and until then equals an empty one
        if type(decomp_table) is dict and not decomp_table:
            return self
        made: torch.export.ExportedProgram = super().run_decompositions(decomp_table, **options)
        return made


def contents(prepared: Prepared) -> dict[Node, torch.Tensor]:
    """Placeholder -> the weight or constant that it stands for."""
    tensors = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    return {
        prepared.placeholders[spec.arg.name]: signature.tensor_of(prepared.program, spec)
        for spec in prepared.program.graph_signature.input_specs
        if spec.kind in tensors
    }


def functional(
    prepared: Prepared,
    constants: Mapping[Node, torch.Tensor],
    state: State | None,
    largest: Mapping[Any, int],
) -> torch.export.ExportedProgram:
    """The prepared graph as a program of its own.

    Args:
        prepared: Its results are what is computed, then the contents of changed inputs.
        constants: Placeholders that were added, with their tensors.
        state: What the program keeps, with placeholders of their own; None for nothing.
        largest: Symbol -> its largest value.
    """
    program, graph = prepared.program, prepared.graph
    ranges = {
        symbol: ValueRanges(span.lower, max(largest[symbol], 3)) if symbol in largest else span
        for symbol, span in program.range_constraints.items()
    }
    kept = state.buffers if state else ()
    # as buffers: ExecuTorch loses constants of other kinds that a delegate takes
    own = [*((node, node.name) for node in constants), *((one.before, one.name) for one in kept)]
    specs = {
        node.name: InputSpec(InputKind.BUFFER, TensorArgument(node.name), name, persistent=True)
        for node, name in own
    }
    for spec in program.graph_signature.input_specs:
        arg = copy.copy(spec.arg)
        if spec.target is not None:
            _lay_out(prepared.placeholders[arg.name])
        if (given := prepared.placeholders.get(getattr(arg, "name", ""))) is not None:
            arg.name = given.name
        specs[getattr(arg, "name", "")] = InputSpec(spec.kind, arg, spec.target, spec.persistent)
    if state is not None and state.length is not None:
        name = state.length.name
        specs[name] = InputSpec(InputKind.USER_INPUT, TensorArgument(name), None)
    inputs = [specs[node.name] for node in graph.find_nodes(op="placeholder")]
    taken = [str(spec.arg.name) for spec in inputs if spec.kind == InputKind.USER_INPUT]
    results: Any = graph.output_node().args[0]
    outputs = [
        OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(one.after.name), one.name) for one in kept
    ]
    outputs += [
        OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in results[len(kept) :]
    ]
    tensors = {
        **program.state_dict,
        **{node.name: tensor for node, tensor in constants.items()},
        **{one.name: one.content for one in kept},
    }
    return _Functional(
        root=torch.fx.GraphModule(program.graph_module, graph),
        graph=graph,
        graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict={name: _apart(tensor) for name, tensor in tensors.items()},
        range_constraints=ranges,
        module_call_graph=_call_graph(program, taken, len(results) - len(kept)),
        example_inputs=None,
        constants={
            name: _apart(value) if isinstance(value, torch.Tensor) else value
            for name, value in program.constants.items()
        },
    )


def _lay_out(weight: Node) -> None:
    """Let a placeholder say how `_apart` lays out its tensor."""
    value = weight.meta.get("val")
    if isinstance(value, FakeTensor) and not value.is_contiguous():
        weight.meta["val"] = value.fake_mode.from_tensor(
            torch.empty(value.shape, dtype=value.dtype), static_shapes=True
        )


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that fills its memory row by row.

    Of a part of another, XNNPACK's serializer writes what lies at the other's start, and it takes no other layouts.
    """
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    if whole and tensor.is_contiguous():
        return tensor
    made = tensor.detach().clone(memory_format=torch.contiguous_format)
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made


def _call_graph(program: torch.export.ExportedProgram, taken: Sequence[str], returned: int) -> list[Any]:
    """One entry that says how a call is flattened: it takes tensors by name and returns tensors."""
    from torch.utils._pytree import tree_structure

    entry = copy.copy(program.module_call_graph[0])
    entry.signature = copy.copy(entry.signature)
    entry.signature.in_spec = tree_structure(((), dict.fromkeys(taken, 0)))
    entry.signature.out_spec = tree_structure(tuple(range(returned)))
    entry.signature.forward_arg_names = list(taken)
    return [entry]
