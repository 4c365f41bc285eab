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


def register_masks() -> None:
    """Add the implementation to those that transformers knows."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionMaskInterface.register(NAME, _full_mask)
    AttentionInterface.register(NAME, sdpa_attention_forward)


def always_make_masks(model: torch.nn.Module) -> list[Any]:
    """Have the model's own code make every mask from now on, in place of `sdpa`.

    Returns:
        The configs that say so now.
    """
    register_masks()
    changed = []
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == "sdpa":
            config._attn_implementation_internal = (
                NAME  # the public setter would ask the model whether it knows it
            )
            changed.append(config)
    return changed


@contextmanager
def masks_made(model: torch.nn.Module) -> Iterator[None]:
    """`always_make_masks` for the body of a `with`."""
    changed = always_make_masks(model)
    try:
        yield
    finally:
        for config in changed:
            config._attn_implementation_internal = "sdpa"
