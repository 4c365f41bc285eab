"""Which weights and inputs a program writes to.

A graph that changes a buffer in place changes it for everyone who holds it, so such a buffer stays a program's own. One that
changes an input changes what the caller holds, who must know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.export.graph_signature import InputKind


def written(program: torch.export.ExportedProgram) -> set[str]:
    """Names of the weights and constants that a call of the program changes, or may change."""
    specs = program.graph_signature.input_specs
    lifted = {
        spec.arg.name: spec.target for spec in specs if spec.kind != InputKind.USER_INPUT and spec.target
    }
    outputs = program.graph_signature.output_specs
    found = {spec.target for spec in outputs if spec.target in lifted.values() and spec.target is not None}
    return found | _changed(program, lifted)


def written_inputs(program: torch.export.ExportedProgram) -> set[str]:
    """Names of the placeholders of the caller's tensors that a call of the program changes, or may change."""
    names = [
        spec.arg.name for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT
    ]
    mutated = set(program.graph_signature.user_inputs_to_mutate.values())
    return mutated | _changed(program, {name: name for name in names})


def _changed(program: torch.export.ExportedProgram, roots: Mapping[str, str]) -> set[str]:
    """Labels of the placeholders whose tensors some node writes to.

    Args:
        program: The program.
        roots: Placeholder -> its label.
    """
    found: set[str] = set()
    #: node -> labels of what its value may be, or be a view of
    views: dict[torch.fx.Node, set[str]] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in roots:
            views[node] = {roots[node.name]}
        elif node.op == "call_function" and any(source in views for source in node.all_input_nodes):
            seen, changed = _effect(node, views, program.graph_module)
            views[node] = seen
            found |= changed
    return found


def _effect(
    node: torch.fx.Node, views: dict[torch.fx.Node, set[str]], owner: torch.nn.Module
) -> tuple[set[str], set[str]]:
    """What a node's value may share memory with, and what the node writes to."""
    seen: set[str] = set()
    changed: set[str] = set()
    if not isinstance(node.target, torch._ops.OpOverload):
        # items of a list of views, and control flow: what its branches do to what goes in is not followed
        seen = set().union(*(views.get(source, set()) for source in node.all_input_nodes))
        return seen, seen if any(map(_writes, _branches(node, owner))) else set()
    for argument, value in _arguments(node):
        if argument.alias_info is None:
            continue
        names = set().union(*(views.get(source, set()) for source in _nodes(value)))
        seen |= names
        if argument.alias_info.is_write:
            changed |= names
    return seen, changed


def _branches(node: torch.fx.Node, owner: torch.nn.Module) -> Iterator[torch.fx.GraphModule]:
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            module = getattr(owner, str(source.target), None)
            if isinstance(module, torch.fx.GraphModule):
                yield from (part for part in module.modules() if isinstance(part, torch.fx.GraphModule))


def _writes(module: torch.fx.GraphModule) -> bool:
    return any(
        argument.alias_info is not None and argument.alias_info.is_write
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        for argument, _ in _arguments(node)
    )


def _arguments(node: torch.fx.Node) -> Iterator[tuple[Any, Any]]:
    """The arguments that an operator is given, each with its place in the schema."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    yield from zip(schema, node.args, strict=False)
    yield from ((argument, node.kwargs[argument.name]) for argument in schema if argument.name in node.kwargs)


def _nodes(value: Any) -> Iterator[torch.fx.Node]:
    if isinstance(value, torch.fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes(item)
