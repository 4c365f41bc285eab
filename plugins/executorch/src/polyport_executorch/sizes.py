"""Sizes that a model computes in tensors, written as sizes.

A number that is read from a tensor may be anything to the tracer, and ExecuTorch decides nothing about tensors of such sizes. What is
computed of sizes alone, as in `torch.tensor(x.size(1)) * 2`, isn't read from a tensor: it is an expression of sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from polyport.errors import ExportError
from polyport_executorch.building import Builder, arguments
from polyport_executorch.portable import COPIES, given_to

Node = torch.fx.Node
aten = torch.ops.aten

_READS = {aten.item.default, aten._local_scalar_dense.default}

_COMPUTED: dict[Any, Callable[[Any, Any], Any]] = {
    aten.add.Tensor: operator.add,
    aten.add.Scalar: operator.add,
    aten.sub.Tensor: operator.sub,
    aten.sub.Scalar: operator.sub,
    aten.rsub.Scalar: operator.sub,
    aten.mul.Tensor: operator.mul,
    aten.mul.Scalar: operator.mul,
    aten.minimum.default: torch.sym_min,
    aten.maximum.default: torch.sym_max,
}


def read_from_sizes(builder: Builder) -> None:
    """Replace numbers that are read from tensors by the sizes that they are computed of.

    Args:
        builder: Of a functional graph, which is changed.
    """
    found = False
    for node in list(builder.graph.nodes):
        value = node.meta.get("val")
        if node.target not in _READS or not isinstance(value, torch.SymInt):
            continue
        with builder.graph.inserting_before(node):
            size = _number(builder, given_to(node))
        if size is not None:
            found = True
            _name(value, size.meta["val"] if isinstance(size, Node) else size)
            node.replace_all_uses_with(size)
            builder.graph.erase_node(node)
    if found:
        builder.graph.eliminate_dead_code()
        _propagate(builder)


def without_powers(module: torch.fx.GraphModule) -> None:
    """Write sizes that are computed as powers as products: ExecuTorch has no operation for powers of sizes.

    Args:
        module: What is left to ExecuTorch's own kernels; changed.

    Raises:
        ExportError: A size is computed as a root. Names it.
    """
    for node in module.graph.find_nodes(op="call_function", target=operator.pow):
        base, exponent = node.args
        if not isinstance(exponent, int) or exponent < 1 or not isinstance(base, Node):
            raise ExportError(
                f"The model computes a size as a power ({base} ** {exponent}), and ExecuTorch has no operation for that. "
                "Export with fixed sizes: leave that axis out of `dynamic_shapes`.",
                stage="lower",
                backend="executorch",
            )
        made = base
        with module.graph.inserting_before(node):
            for _ in range(exponent - 1):
                factor, made = made, module.graph.call_function(operator.mul, (made, base))
                made.meta["val"] = factor.meta["val"] * base.meta["val"]
        node.replace_all_uses_with(made)
        module.graph.erase_node(node)
    module.recompile()


def _number(b: Builder, node: Any) -> Any:
    """What a tensor without axes is made of: a number, or a node that has a size; None where that is anything else."""
    if not isinstance(node, Node):
        return node if isinstance(node, int) and not isinstance(node, bool) else None
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return node
    if not isinstance(value, torch.Tensor) or value.dim() or value.dtype not in (torch.int64, torch.int32):
        return None
    if (constant := b.content(node)) is not None:
        return int(constant)
    if str(node.target) in COPIES or node.target is aten.scalar_tensor.default:
        return _number(b, given_to(node))
    if (compute := _COMPUTED.get(node.target)) is None or arguments(node).get("alpha", 1) != 1:
        return None
    one, other = (_number(b, argument) for argument in node.args[:2])
    if node.target is aten.rsub.Scalar:
        one, other = other, one
    if one is None or other is None:
        return None
    return b.of_sizes(compute, one, other)


def _propagate(b: Builder) -> None:
    """Let sizes that follow from such numbers, as those of a slice, be known by them too."""
    for node in b.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor) and any(map(_unknown, value.shape)):
            for before, after in zip(value.shape, b.run(node).shape, strict=True):
                if _unknown(before):
                    _name(before, after)


def _unknown(size: Any) -> bool:
    """Whether a size is a number of its own to the tracer."""
    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size))


def _name(number: Any, size: Any) -> None:
    """Tell the tracer that a number of its own is a size."""
    symbol = number.node.expr
    expression = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
    if symbol.is_Symbol and symbol != expression:
        number.node.shape_env._set_replacement(symbol, expression, "computed of sizes")
