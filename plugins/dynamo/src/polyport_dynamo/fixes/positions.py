"""Position embeddings that skip their interpolation at the configured image size."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from polyport.patching import Patch, Target


def _is_tracing(found: Callable[[], bool]) -> Callable[[], bool]:
    def is_tracing() -> bool:
        if torch.compiler.is_dynamo_compiling():
            return False  # strict mode reads this very code, and knows no frames
        caller = sys._getframe(1)
        name = caller.f_code.co_name
        # only where the model chooses between its table and an interpolation of it; other code takes this for the
        # old tracer, where sizes were tensors
        if caller.f_globals.get("__name__", "").startswith("transformers.models.") and (
            "interpolate" in name or "pos" in name
        ):
            return True
        return found()

    return is_tracing


def _reproduce() -> None:
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8, mlp_ratio=1
    )
    model = Dinov2Model(config).embeddings.eval()
    auto = torch.export.Dim.AUTO
    with torch.no_grad():
        program = torch.export.export(
            model, (torch.zeros(2, 3, 40, 48),), dynamic_shapes={"pixel_values": {2: auto, 3: auto}}
        )
        program.module()(torch.zeros(2, 3, 32, 32))


PATCH = Patch(
    id="transformers-position-interpolation",
    targets=(Target("torch.jit:is_tracing", _is_tracing),),
    reason=(
        "Vision models return their position table as it is when the image has the configured size, and interpolate it "
        "otherwise; a trace keeps one of the two. Modeling code always interpolates when torch.jit traces, which is right "
        "at every size; torch.export has to be counted as tracing too."
    ),
    upstream="unreported",
    affects={"transformers": ">=5.20,<6"},
    reproduce=_reproduce,
)
