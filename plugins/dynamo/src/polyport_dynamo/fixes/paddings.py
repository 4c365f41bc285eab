"""EnCodec's convolutions, whose paddings are tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from polyport.patching import Patch, Target
from polyport_dynamo.fixes.scope import uses

_MODULE = "transformers.models.encodec.modeling_encodec"


def _forward(_: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        stride = self.conv.stride[0]
        total = (self.conv.kernel_size[0] - 1) * self.conv.dilation[0] + 1 - stride
        length = hidden_states.shape[-1]
        # the last frame is to be whole
        extra = stride * ((length + stride - 1) // stride) - length
        right = extra if self.causal else total // 2 + extra
        left = total if self.causal else total - total // 2
        hidden_states = self.conv(self._pad1d(hidden_states, (left, right), mode=self.pad_mode))
        return self.norm(hidden_states) if self.norm_type == "time_group_norm" else hidden_states

    return forward


def _reproduce() -> None:
    from transformers import EncodecConfig
    from transformers.models.encodec.modeling_encodec import EncodecConv1d

    layer = EncodecConv1d(EncodecConfig(), 2, 2, 5, stride=2).eval()
    shapes = {"hidden_states": {2: torch.export.Dim.AUTO}}
    with torch.no_grad():
        program = torch.export.export(layer, (torch.zeros(2, 2, 31),), dynamic_shapes=shapes)
        program.module()(torch.zeros(2, 2, 40))


PATCH = Patch(
    id="transformers-encodec-padding",
    targets=(Target(f"{_MODULE}:EncodecConv1d.forward", _forward),),
    reason=(
        "EncodecConv1d keeps its stride and padding as tensors and compares the audio's length with them, which "
        "torch.export refuses as data-dependent. The same padding is computed from the integers of the convolution."
    ),
    upstream="unreported",
    affects={"transformers": ">=5.20,<6"},
    reproduce=_reproduce,
    applies=uses(_MODULE),
)
