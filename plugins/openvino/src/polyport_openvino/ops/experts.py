"""Products of groups of rows with one matrix per group, as mixtures of experts compute them.

The operator that transformers defines for it loops over group sizes that are known at run time only, so that it cannot be
decomposed. `VariadicSplit` takes such sizes as an input.
"""

from __future__ import annotations

from typing import Any

import openvino as ov
import torch

from polyport_dynamo.lowering.facts import dims, traced
from polyport_openvino.context import Context
from polyport_openvino.ops.table import translates

Node = torch.fx.Node


def _is_grouped(node: Node) -> bool:
    source, weight, *rest = node.args
    offsets = rest[0] if rest else node.kwargs.get("offs")
    return (
        isinstance(source, Node)
        and isinstance(weight, Node)
        and offsets is not None
        and traced(source).dim() == 2
        and traced(weight).dim() == 3
        and isinstance(dims(weight)[0], int)
    )


@translates("transformers::grouped_mm_fallback", torch.ops.aten._grouped_mm.default, when=_is_grouped)
def grouped_mm(
    c: Context, node: Node, source: Node, weight: Node, offs: Node, *rest: Any, **options: Any
) -> Any:
    """Rows `offs[i - 1]` to `offs[i]` of the input times matrix i; zeros for rows after the last group.

    Every group has a node of its own, so that its matrix is a constant to the runtime, which then packs it once.
    """
    del rest, options
    groups, _, width = dims(weight)
    dtype = traced(node).dtype
    rows = c.tensor(source, dtype)
    lengths = _lengths(c, rows, offs, groups)
    *parts, others = ov.opset15.variadic_split(rows, c.constant(0, torch.int64), lengths).outputs()
    matrices = c.tensor(weight, dtype)
    made = []
    for index, part in enumerate(parts):
        matrix = c.op("gather", matrices, c.constant(index, torch.int64), c.constant(0, torch.int64))
        made.append(c.op("matmul", part, matrix, False, False))
    empty = c.op(
        "concat", [c.op("unsqueeze", c.axis_size(others, 0), c.constant(0, torch.int64)), c.ints(width)], 0
    )
    return c.op("concat", [*made, c.op("broadcast", c.constant(0, dtype), empty)], 0)


def _lengths(c: Context, rows: ov.Output, offs: Node, groups: int) -> ov.Output:
    """How many rows there are in each group, and behind the last."""
    ends = c.tensor(offs, torch.int64)
    total = c.op("unsqueeze", c.axis_size(rows, 0), c.constant(0, torch.int64))
    bounds = c.op("concat", [c.ints(0), ends, total], 0)
    later = c.op("slice", bounds, c.ints(1), c.ints(groups + 2), c.ints(1))
    earlier = c.op("slice", bounds, c.ints(0), c.ints(groups + 1), c.ints(1))
    lengths = c.op("subtract", later, earlier)
    # how many results a split has must be known when the model is built
    return (
        lengths
        if lengths.get_partial_shape().is_static
        else c.op("reshape", lengths, c.ints(groups + 1), False)
    )
