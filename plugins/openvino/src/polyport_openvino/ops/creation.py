"""Operators that make tensors from sizes and numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from polyport_dynamo.lowering.facts import dims, traced
from polyport_openvino.context import Context
from polyport_openvino.ops.table import translates

aten = torch.ops.aten
Node = torch.fx.Node

#: Larger constant tensors are computed in the graph, so that they take no room in the file.
_LARGEST_CONSTANT = 256


def _filled(c: Context, node: Node, value: Any) -> Any:
    """A tensor of the node's shape and type with one value everywhere."""
    fake, shape = traced(node), dims(node)
    static = [dim for dim in shape if isinstance(dim, int)]
    if not isinstance(value, Node) and len(static) == len(shape) and math.prod(static) <= _LARGEST_CONSTANT:
        return c.constant(np.full(static, value), fake.dtype)
    return c.op("broadcast", c.tensor(value, fake.dtype), c.sizes(list(fake.shape)))


@translates(aten.full.default, aten.new_full.default)
def full(c: Context, node: Node, *args: Any, **options: Any) -> Any:
    """Filled with a number."""
    return _filled(c, node, options.get("fill_value", args[-1]))


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
            aten.empty_like.default, aten.new_empty.default, aten.empty_permuted.default)  # fmt: skip
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
    """Numbers in steps."""
    del options
    start, end, step = {1: (0, args[0], 1), 2: (*args, 1)}.get(len(args), args)
    given = (start, end, step)
    dtype = traced(node).dtype
    if (
        not any(isinstance(arg, Node) for arg in given)
        and math.ceil((end - start) / step) <= _LARGEST_CONSTANT
    ):
        return c.constant(torch.arange(start, end, step, dtype=dtype).tolist(), dtype)
    kinds = [arg.meta.get("val") if isinstance(arg, Node) else arg for arg in given]
    whole = all(isinstance(kind, int | torch.SymInt) for kind in kinds)
    wanted = torch.int64 if whole else torch.float32
    made = c.op("range", *(c.tensor(arg, wanted) for arg in given), "i64" if whole else "f32")
    return c.cast(made, dtype)


@translates(aten.embedding.default)
def embedding(c: Context, node: Node, weight: Node, indices: Node, *args: Any, **options: Any) -> Any:
    """Rows of a table; padding rows matter in training only."""
    del node, args, options
    return c.op("gather", c.value(weight), c.value(indices), c.constant(0, torch.int64))
