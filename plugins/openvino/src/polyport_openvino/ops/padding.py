"""Elements added around a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polyport_dynamo.lowering.facts import traced
from polyport_openvino.context import Context
from polyport_openvino.ops.table import translates

aten = torch.ops.aten
Node = torch.fx.Node

_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}


def _is_known(node: Node) -> bool:
    mode = node.args[2] if len(node.args) > 2 else node.kwargs.get("mode", "constant")
    return mode in _MODES and not traced(node).dtype.is_complex


@translates(aten.constant_pad_nd.default, when=lambda node: not traced(node).dtype.is_complex)
def constant_pad(c: Context, node: Node, self: Node, pad: Sequence[Any], value: Any = 0) -> Any:
    """A number around a tensor."""
    return _padded(c, node, self, pad, "constant", value)


@translates(aten.pad.default, when=_is_known)
def padded(
    c: Context, node: Node, self: Node, pad: Sequence[Any], mode: str = "constant", value: Any = None
) -> Any:
    """A number, the mirror image, or the outermost elements around a tensor."""
    return _padded(c, node, self, pad, _MODES[mode], 0 if value is None else value)


def _padded(c: Context, node: Node, self: Node, pad: Sequence[Any], mode: str, value: Any) -> Any:
    """Pads are given in pairs from the last axis on; negative ones crop."""
    dtype, rank = traced(node).dtype, traced(self).dim()
    pairs = [(0, 0)] * (rank - len(pad) // 2) + [(pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2)]
    before, after = (c.sizes([pair[side] for pair in pairs]) for side in (0, 1))
    # pads a boolean tensor as bytes: the operator takes numbers only
    carried = torch.uint8 if dtype == torch.bool else dtype
    fill = (c.tensor(value, carried),) if mode == "constant" else ()
    made = c.op("pad", c.cast(c.tensor(self, dtype), carried), before, after, mode, *fill)
    return c.cast(made, dtype)
