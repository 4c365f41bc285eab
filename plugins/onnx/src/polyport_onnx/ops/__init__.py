"""Our own translations of torch operators: the frequent ones, and those that torchlib lacks or gets wrong.

The frequent ones are here for the graph they make, not only for the time: torchlib does not know shapes, so it computes
them in the graph; the tracer does know them, and most of that arithmetic is a constant, a 0 or a -1.
"""

from __future__ import annotations

from polyport_onnx.ops import (
    attention,
    convolution,
    creation,
    elementwise,
    experts,
    linear,
    scatter,
    shape,
    sym,
)
from polyport_onnx.ops.table import TABLE, Translation, find

__all__ = [
    "TABLE",
    "Translation",
    "attention",
    "convolution",
    "creation",
    "elementwise",
    "experts",
    "find",
    "linear",
    "scatter",
    "shape",
    "sym",
]
