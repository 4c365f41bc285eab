"""The last inputs of a causal convolution, which a cache pads where a prompt is shorter than the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from polyport.patching import Patch, Target
from polyport_dynamo.fixes.scope import modules_with


def _update(found: Callable[..., Any]) -> Callable[..., Any]:
    def update_conv_state(
        self: Any,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        first = not self.has_previous_state[state_idx] and not self.record_past
        if first and conv_kernel_size is not None:
            # zeros are what a causal convolution sees before the first token, and callers cut off what came in front
            conv_states = functional.pad(conv_states, (conv_kernel_size, 0))
        return found(self, conv_states, state_idx=state_idx, conv_kernel_size=conv_kernel_size, **kwargs)

    return update_conv_state


def _reproduce() -> None:
    from transformers import cache_utils

    class State(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            layer = cache_utils.LinearAttentionLayer()
            full = layer.update_conv_state(x, conv_kernel_size=4)
            state = layer.conv_states[0]
            assert state is not None  # noqa: S101  for the type checker
            return full[..., -x.shape[-1] :], state

    samples = [torch.rand(1, 2, length) for length in (3, 7)]
    wanted = [functional.pad(x, (4, 0))[..., -4:] for x in samples]
    for traced in samples:
        program = torch.export.export(State(), (traced,), dynamic_shapes={"x": {2: torch.export.Dim.AUTO}})
        for x, state in zip(samples, wanted, strict=True):
            found = program.module()(x)
            torch.testing.assert_close(found, (x, state))


PATCH = Patch(
    id="transformers-short-prompts",
    targets=(Target("transformers.cache_utils:LinearAttentionLayer.update_conv_state", _update),),
    reason=(
        "The cache of models with a causal convolution (Mamba, Bamba, Qwen3-Next, LFM2) pads a prompt that is shorter than the "
        "kernel, and a trace keeps the branch of the sample: the graph refuses prompts of the other kind. Padding always "
        "gives the same state."
    ),
    upstream="unreported",
    affects={"transformers": ">=5.20,<6"},
    reproduce=_reproduce,
    applies=modules_with("causal_conv1d_fn"),
)
