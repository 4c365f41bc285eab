"""Operators that make tensors from sizes and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from polyport_dynamo.lowering.facts import dims, traced
from polyport_onnx.context import Context
from polyport_onnx.ops.table import translates
from polyport_onnx.torch_internals import onnx_dtype

aten = torch.ops.aten
Node = torch.fx.Node

#: Larger constant tensors are computed in the graph, so that they take no room in the file.
_LARGEST_CONSTANT = 256


def _filled(c: Context, node: Node, value: Any) -> ir.Value:
    """A tensor of the node's shape and type with one value everywhere."""
    fake, shape = traced(node), dims(node)
    dtype = onnx_dtype(fake.dtype)
    if not isinstance(value, Node):
        static = [dim for dim in shape if isinstance(dim, int)]
        if len(static) == len(shape) and math.prod(static) <= _LARGEST_CONSTANT:
            return c.emit.constant(np.full(static, value), dtype)
    return c.emit.op("Expand", c.tensor(value, fake.dtype), c.sizes(fake.shape))


@translates(aten.full.default, aten.new_full.default)
def full(c: Context, node: Node, *args: Any, **options: Any) -> Any:
    """Filled with a number."""
    del options
    return _filled(c, node, args[-1])


@translates(aten.full_like.default)
def full_like(c: Context, node: Node, self: Node, fill_value: Any, **options: Any) -> Any:
    """Filled with a number, shaped like another tensor."""
    del self, options
    return _filled(c, node, fill_value)


@translates(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(c: Context, node: Node, *args: Any, **options: Any) -> Any:
    """Ones."""
    del args, options
    return _filled(c, node, 1)


@translates(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.empty.memory_format,
            aten.empty_like.default, aten.new_empty.default)  # fmt: skip
def zeros(c: Context, node: Node, *args: Any, **options: Any) -> Any:
    """Zeros, also for memory that is not initialised: its content must not matter."""
    del args, options
    return _filled(c, node, 0)


@translates(aten.scalar_tensor.default)
def scalar_tensor(c: Context, node: Node, s: Any, **options: Any) -> Any:
    """A number as a tensor."""
    del options
    return c.tensor(s, traced(node).dtype)


@translates(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(c: Context, node: Node, *args: Any, **options: Any) -> Any:
    """Whole numbers in steps. With fractions torchlib does it."""
    del options
    start, end, step = {1: (0, args[0], 1), 2: (*args, 1)}.get(len(args), args)
    whole = [arg for arg in (start, end, step) if isinstance(arg.meta.get("val") if isinstance(arg, Node) else arg,
                                                             (int, torch.SymInt))]  # fmt: skip
    if len(whole) != 3:
        return NotImplemented
    dtype = onnx_dtype(traced(node).dtype)
    if not any(isinstance(arg, Node) for arg in whole) and (end - start) / step <= _LARGEST_CONSTANT:
        return c.emit.constant(np.arange(start, end, step), dtype)
    scalars = [
        c.value(arg) if isinstance(arg, Node) else c.emit.constant(arg, ir.DataType.INT64) for arg in whole
    ]
    return c.emit.cast(c.emit.op("Range", *scalars), dtype)


@translates(aten.embedding.default)
def embedding(c: Context, node: Node, weight: Node, indices: Node, *args: Any, **options: Any) -> Any:
    """Rows of a table; padding rows matter in training only."""
    del node, args, options
    return c.emit.op("Gather", c.value(weight), c.value(indices), axis=0)


@translates(aten.cat.default, aten.stack.default)
def cat(c: Context, node: Node, tensors: Sequence[Node], dim: int = 0) -> Any:
    """Concatenate, or stack along a new axis. torch ignores empty vectors among tensors of higher rank."""
    dtype, rank = traced(node).dtype, traced(node).dim()
    if node.target is aten.stack.default:
        axis = dim % rank
        parts = [c.emit.op("Unsqueeze", c.tensor(t, dtype), c.emit.ints(axis)) for t in tensors]
        return c.emit.concat(parts, axis)
    kept = [t for t in tensors if traced(t).dim() == rank]
    return c.emit.concat([c.tensor(t, dtype) for t in kept], dim % rank)
