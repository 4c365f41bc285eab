"""Convolutions that torchlib gets wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polyport_dynamo.lowering.facts import traced
from polyport_onnx.context import Context
from polyport_onnx.ops.table import translates

aten = torch.ops.aten
Node = torch.fx.Node


@translates(aten.conv3d.default)
def conv3d(c: Context, node: Node, source: Node, weight: Node, bias: Node | None = None, stride: Sequence[int] = (1,),
           padding: Sequence[int] = (0,), dilation: Sequence[int] = (1,), groups: int = 1) -> Any:  # fmt: skip
    """A convolution without a bias, in whose place torchlib puts a matrix (patches of videos: Qwen-VL)."""
    del node
    if bias is not None or traced(source).dim() != 5:
        return NotImplemented
    pads = _three(padding)
    return c.emit.op(
        "Conv",
        c.value(source),
        c.value(weight),
        strides=_three(stride),
        pads=[*pads, *pads],
        dilations=_three(dilation),
        group=groups,
    )


def _three(sizes: Sequence[int]) -> list[int]:
    return list(sizes) if len(sizes) == 3 else list(sizes) * 3
