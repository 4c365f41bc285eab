"""Implicit type promotion: torch computes `int + float` or `int > 0.5`; ONNX wants both sides of one type.

torch.onnx inserts the conversions in a pass over the whole graph that evaluates every node again. The tracer has
recorded the types already, so here they are compared node by node and only differences cost something.
"""

from __future__ import annotations

import torch

from polyport_dynamo.lowering.facts import common_dtype

_TO_OUTPUT = frozenset(
    [
        "add",
        "sub",
        "mul",
        "rsub",
        "div",
        "true_divide",
        "floor_divide",
        "pow",
        "remainder",
        "fmod",
        "maximum",
        "minimum",
        "cat",
        "stack",
        "lerp",
        "addcmul",
        "addcdiv",
        "atan2",
        "clamp",
        "clamp_min",
        "clamp_max",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "hypot",
        "logaddexp",
        "xlogy",
        "sqrt",
        "rsqrt",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "asinh",
        "acosh",
        "atanh",
        "sigmoid",
        "reciprocal",
        "erf",
        "erfc",
        "erfinv",
        "softplus",
        "sum",
        "prod",
        "cumsum",
        "mean",
        "logit",
        "mm",
        "bmm",
        "matmul",
        "addmm",
        "baddbmm",
        "linear",
    ]
)
_TO_COMMON = frozenset(["eq", "ne", "lt", "le", "gt", "ge", "isclose"])
_TO_BOOL = frozenset(["logical_and", "logical_or", "logical_xor", "logical_not", "any", "all"])


def operand_dtype(node: torch.fx.Node) -> torch.dtype | None:
    """The type that the tensor operands of a node must have in ONNX, or None where it does not matter.

    Args:
        node: a call of an aten operator, traced, so that it and its arguments carry `meta["val"]`.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name.removeprefix("aten::")
    if name in _TO_OUTPUT:
        value = node.meta.get("val")
        return value.dtype if isinstance(value, torch.Tensor) else None
    if name in _TO_COMMON:
        return common_dtype(node.args[0], node.args[1])
    return torch.bool if name in _TO_BOOL else None
