"""Operators without a translation, replaced by the operators torch writes them in terms of.

Only those nodes are traced, over the fake tensors that the tracer has recorded, and equal ones once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from polyport_dynamo.lowering import internals
from polyport_dynamo.lowering.functionalize import NotLocal, functionalize

Node = torch.fx.Node

#: Nothing in the result depends on them: the tracer has checked what they check.
_CHECKS = frozenset({
    torch.ops.aten._assert_tensor_metadata.default, torch.ops.aten._assert_async.msg, torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range_for_size.default, torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten._assert_async.default,
})  # fmt: skip
_DEEPEST = 8


def remove_dead(graph: torch.fx.Graph) -> None:
    """Erase checks and nodes whose results nobody uses. The graph must be functional."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and (node.target in _CHECKS or not node.users):
            graph.erase_node(node)


def decompose(graph: torch.fx.Graph, known: Callable[[Node], bool]) -> None:
    """Expand every node that has no translation, until all have one or nothing is left to expand.

    Args:
        graph: changed in place; of a copy of the program.
        known: whether a node has a translation.

    Raises:
        NotLocal: an expansion cannot be traced by itself.
    """
    cache: dict[Any, torch.fx.GraphModule] = {}
    work = [(node, 0) for node in graph.nodes if node.op == "call_function" and not known(node)]
    while work:
        node, depth = work.pop()
        function = internals.decomposition_of(node.target)
        if function is None or depth > _DEEPEST:
            continue  # The translation names it, together with all others that lack one.
        made = _expand(graph, node, function, cache)
        work.extend((new, depth + 1) for new in made if new.op == "call_function" and not known(new))


def _expand(
    graph: torch.fx.Graph, node: Node, function: Callable[..., Any], cache: dict[Any, Any]
) -> list[Node]:
    """Put the traced expansion in the place of a node."""
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))
    leaves = [leaf for leaf in flat if isinstance(leaf, torch.fx.Node)]
    key = (node.target, str(spec), *(_describe(leaf) for leaf in flat))
    traced = cache.get(key)
    if traced is None:
        traced = cache[key] = _trace(function, flat, spec)
    inner = iter(leaves)
    places: dict[Node, Any] = {}
    made: list[Node] = []
    with graph.inserting_before(node):
        for step in traced.graph.nodes:
            if step.op == "placeholder":
                places[step] = next(inner)
            elif step.op == "get_attr":
                raise NotLocal(f"{node.target} expands to a graph with constants")
            elif step.op == "call_function":
                new = places[step] = graph.node_copy(step, lambda arg: places[arg])
                new.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
                made.append(new)
        result = torch.fx.map_arg(traced.graph.output_node().args[0], lambda arg: places[arg])
    _replace(graph, node, result)
    return made


def _replace(graph: torch.fx.Graph, node: Node, result: Any) -> None:
    """Let the users of a node use the expansion's result instead."""
    if isinstance(result, torch.fx.Node):
        node.replace_all_uses_with(result, propagate_meta=False)
        for key in ("val",):
            if isinstance(node.meta.get(key), torch.Tensor):
                result.meta[key] = node.meta[key]
    else:
        for user in list(node.users):
            if (
                len(user.args) != 2
                or not isinstance(result, (list, tuple))
                or not isinstance(user.args[1], int)
            ):
                raise NotLocal(f"{node.target} has several results and they are used as one")
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)


def _trace(function: Callable[..., Any], flat: list[Any], spec: Any) -> torch.fx.GraphModule:
    positions = [index for index, leaf in enumerate(flat) if isinstance(leaf, torch.fx.Node)]
    values = [flat[index].meta["val"] for index in positions]

    def call(*arguments: Any) -> Any:
        filled = list(flat)
        for index, argument in zip(positions, arguments, strict=True):
            filled[index] = argument
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return function(*args, **kwargs)

    mode = next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)
    try:
        traced = internals.trace_fake(call, values, mode)
    except Exception as error:
        raise NotLocal(f"{function} cannot be traced by itself: {error}") from error
    functionalize(traced.graph)
    remove_dead(traced.graph)
    return traced


def _describe(leaf: Any) -> Any:
    """What an expansion depends on: of tensors the type and shape, of everything else the value."""
    value = leaf.meta["val"] if isinstance(leaf, torch.fx.Node) else leaf
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(map(str, value.shape)))
    return (type(value).__name__, str(value))
