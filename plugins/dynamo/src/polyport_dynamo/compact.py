"""The function that a runner calls: the graph without what only a trace needs.

A decode step is thousands of small operators, so what Python does between them counts. A trace asserts the dtype of every
value that is converted, converts values to the dtype that they have, computes sizes that nothing uses, and looks up each
operator by its path at every call. dtypes are fixed in a graph, and those of its inputs are checked before it is called, so
none of it can do anything.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

_CONVERSIONS = frozenset({
    torch.ops.aten.to.dtype,
    torch.ops.aten.to.device,
    torch.ops.aten.to.dtype_layout,
})  # fmt: skip


def compact(program: torch.export.ExportedProgram) -> Callable[..., Any]:
    """The program's graph as a function of its flat inputs, which must have the dtypes and devices of the trace.

    Args:
        program: The program, which stays as it is.
    """
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    for node in list(reversed(graph.nodes)):  # users first, so that what only they needed goes too
        if node.op == "call_function":
            _shorten(graph, node)
    # the module is made for its code; what the graph refers to (branches of control flow) is found in the program's own
    code = type(torch.fx.GraphModule(program.graph_module, graph)).forward
    return types.MethodType(code, program.graph_module)


def _shorten(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    if _asserts_nothing(node) or _is_unused_size(node):
        graph.erase_node(node)
    elif _converts_nothing(node):
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        graph.erase_node(node)
    elif type(node.target) is torch._ops.OpOverload:
        node.target = _direct(node.target)


def _asserts_nothing(node: torch.fx.Node) -> bool:
    """Whether a node asserts what a graph fixes: dtype, device and layout; sizes and strides it does not."""
    if node.target is not torch.ops.aten._assert_tensor_metadata.default:
        return False
    sizes = (*node.args[1:3], node.kwargs.get("size"), node.kwargs.get("stride"))
    return not node.users and all(size is None for size in sizes)


def _is_unused_size(node: torch.fx.Node) -> bool:
    arithmetic = getattr(node.target, "__module__", "") == "_operator"
    return (
        (arithmetic or node.target is torch.ops.aten.sym_size.int)
        and not node.users
        and isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))
    )


def _converts_nothing(node: torch.fx.Node) -> bool:
    """Whether a node gives its input back: same dtype, device and layout, no copy and no other order in memory."""
    if node.target not in _CONVERSIONS or not isinstance(node.args[0], torch.fx.Node):
        return False
    given, wanted = node.args[0].meta.get("val"), node.meta.get("val")
    options = _options(node)
    return (
        isinstance(given, torch.Tensor)
        and isinstance(wanted, torch.Tensor)
        and given.dtype == wanted.dtype
        and given.device == wanted.device
        and given.layout == wanted.layout
        and not options.get("copy")
        and options.get("memory_format") in (None, torch.preserve_format)
    )


def _options(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a node by name, without those that are left out."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


@functools.cache
def _direct(operator: Any) -> Any:
    """What an operator calls, under a name that torch.fx can write into source: a call then runs no Python in between."""
    inner = getattr(operator, "_op", None)
    if not callable(inner):
        return operator
    direct: Any = functools.partial(inner)
    direct.__name__ = operator.name().replace("::", "_").replace(".", "_")
    direct.__module__ = __name__
    return direct
