"""Attention masks that are always there.

transformers leaves a mask out where the attention kernel can do without it, which depends on the values of a call; a
component's interface can't. An attention implementation of our own name makes every mask and computes as `sdpa` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

NAME = "polyport_sdpa"


def _full_mask(*args: Any, **kwargs: Any) -> Any:
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def _register() -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionMaskInterface.register(NAME, _full_mask)
    AttentionInterface.register(NAME, sdpa_attention_forward)


def always_make_masks(model: torch.nn.Module) -> None:
    """Have the model's own code make every mask from now on, in place of `sdpa`."""
    _register()
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == "sdpa":
            config._attn_implementation_internal = (
                NAME  # the public setter would ask the model whether it knows it
            )


@contextmanager
def masks_made(model: torch.nn.Module) -> Iterator[None]:
    """`always_make_masks` for the body of a `with`."""
    changed = [
        config
        for module in model.modules()
        if getattr(config := getattr(module, "config", None), "_attn_implementation", None) == "sdpa"
    ]
    try:
        always_make_masks(model)
        yield
    finally:
        for config in changed:
            config._attn_implementation_internal = "sdpa"
