"""Products of groups of rows with one matrix per group, as mixtures of experts compute them.

torchlib has no translation, and the operator that transformers defines for it loops over group sizes that are known at
run time only, so that it cannot be decomposed. `Split` takes such sizes as an input.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from polyport_dynamo.lowering.facts import dims, traced
from polyport_onnx.context import Context
from polyport_onnx.ops.table import translates

Node = torch.fx.Node


@translates("transformers::grouped_mm_fallback", torch.ops.aten._grouped_mm.default)
def grouped_mm(c: Context, node: Node, source: Node, weight: Node, offs: Node | None = None, *rest: Any,
               **options: Any) -> Any:  # fmt: skip
    """Rows `offs[i - 1]` to `offs[i]` of the input times matrix i; zeros for rows after the last group.

    Every group has a node of its own, so that its matrix is a constant to the runtime, which then packs it once.
    """
    del rest, options
    groups = dims(weight)[0]
    if offs is None or traced(source).dim() != 2 or traced(weight).dim() != 3 or not isinstance(groups, int):
        return NotImplemented
    e = c.emit
    dtype = traced(node).dtype
    rows, matrices = c.tensor(source, dtype), c.tensor(weight, dtype)
    ends = e.cast(c.value(offs), ir.DataType.INT64)
    total = c.axis_size(rows, 0)
    bounds = e.concat([e.ints(0), ends, total])
    later = e.op("Slice", bounds, e.ints(1), e.ints(groups + 2), e.ints(0))
    earlier = e.op("Slice", bounds, e.ints(0), e.ints(groups + 1), e.ints(0))
    *parts, others = e.ops("Split", rows, e.op("Sub", later, earlier), outputs=groups + 1, axis=0)
    made = []
    for part, matrix in zip(
        parts, e.ops("Split", matrices, e.ints(*[1] * groups), outputs=groups, axis=0), strict=True
    ):
        part.type = matrix.type = rows.type
        made.append(e.op("MatMul", part, e.op("Squeeze", matrix, e.ints(0))))
    empty = e.concat([c.axis_size(others, 0), e.ints(dims(weight)[2])])
    return e.concat([*made, e.op("Expand", c.tensor(0, dtype), empty)])
