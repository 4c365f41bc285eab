"""Our own translations of torch operators: the frequent ones, and those that the frontend lacks or gets wrong.

The tracer has recorded every shape and type. The frontend does not see them, so it computes shapes in the graph and guesses
types; most of that arithmetic is a constant, a 0 or a -1.
"""

from __future__ import annotations

from polyport_openvino.ops import (
    attention,
    complexes,
    creation,
    elementwise,
    experts,
    indexing,
    linear,
    loops,
    numbers,
    ordering,
    padding,
    shape,
    sym,
)
from polyport_openvino.ops.table import Translation, find, has, is_complex, translates

__all__ = [
    "Translation",
    "attention",
    "complexes",
    "creation",
    "elementwise",
    "experts",
    "find",
    "has",
    "indexing",
    "is_complex",
    "linear",
    "loops",
    "numbers",
    "ordering",
    "padding",
    "shape",
    "sym",
    "translates",
]
