"""Attention within chunks of a packed sequence, which is computed chunk by chunk in a Python loop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from polyport.patching import Patch, Target
from polyport_dynamo.fixes.scope import modules_with

_NAMESPACE = "polyport_dynamo.fixes.namespace:modeling"


def _requested(found: Callable[..., bool]) -> Callable[..., bool]:
    def is_flash_attention_requested(*args: Any, **kwargs: Any) -> bool:
        if torch.compiler.is_dynamo_compiling():
            return found(*args, **kwargs)  # strict mode reads this very code, and knows no frames
        # the branch for kernels hands the whole sequence and the boundaries to the attention function
        return sys._getframe(1).f_locals.get("cu_seqlens") is not None or found(*args, **kwargs)

    return is_flash_attention_requested


def _interface(found: Callable[..., Any]) -> Callable[..., Any]:
    masks: Any = WeakIdKeyDictionary()  # by boundaries, which all layers share

    def get_interface(self: Any, attn_implementation: Any, default: Any) -> Any:
        attend = found(self, attn_implementation, default)

        def attend_within_chunks(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
            boundaries = kwargs.get("cu_seq_lens_q")
            if boundaries is None or kwargs.get("attention_mask") is not None or len(args) > 2:
                return attend(module, query, *args, **kwargs)
            if boundaries not in masks:
                masks[boundaries] = within_chunks(boundaries, query.shape[2])
            mask = masks[boundaries]
            if kwargs.get("is_causal", getattr(module, "is_causal", True)):
                mask = mask.tril()  # a mask takes the place of the flag
            if attn_implementation != "sdpa":
                mask = torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
            return attend(module, query, *args, **{**kwargs, "attention_mask": mask})

        return attend_within_chunks

    return get_interface


def within_chunks(boundaries: torch.Tensor, length: Any) -> torch.Tensor:
    """Which tokens of a packed sequence see one another.

    Args:
        boundaries: Start of every chunk and end of the last, `[chunks + 1]`; empty chunks do no harm.
        length: Number of tokens.

    Returns:
        `[1, 1, length, length]`, bool.
    """
    marks = torch.zeros(length + 1, dtype=torch.int64, device=boundaries.device)
    chunk = marks.scatter(0, boundaries.long(), 1).cumsum(0)[:length]
    return (chunk[:, None] == chunk[None, :])[None, None]


def _reproduce() -> None:
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import VisionAttention

    config = Qwen2VLVisionConfig(embed_dim=16, hidden_size=16, num_heads=2)
    config._attn_implementation = "sdpa"
    attention: Any = VisionAttention(config).eval()

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, states: torch.Tensor, cu_seqlens: torch.Tensor) -> Any:
            unturned = torch.ones_like(states[:, :8]), torch.zeros_like(states[:, :8])
            return self.attention(states, cu_seqlens=cu_seqlens, position_embeddings=unturned)

    auto = torch.export.Dim.AUTO
    sample = (torch.rand(7, 16), torch.tensor([0, 4, 7]))
    with torch.no_grad():
        program = torch.export.export(Attention().eval(), sample, dynamic_shapes=({0: auto}, {0: auto}))
        states = torch.rand(9, 16)
        found = program.module()(states, torch.tensor([0, 2, 5, 9]))
        chunks = states[:2], states[2:5], states[5:]
        parts = [Attention()(x, torch.tensor([0, len(x)])) for x in chunks]
    torch.testing.assert_close(found, torch.cat(parts))


PATCH = Patch(
    id="transformers-attention-in-chunks",
    targets=(
        Target(f"{_NAMESPACE}.is_flash_attention_requested", _requested),
        Target("transformers.modeling_utils:AttentionInterface.get_interface", _interface),
    ),
    reason=(
        "Vision towers that take the patches of all images in one row (Qwen-VL, GLM-4V, and their kin) cut queries, keys and "
        "values into a Python list with one entry per image or window, and attend in each. While tracing, one attention "
        "goes over the whole row, with a mask that keeps the chunks apart, so that their number and sizes stay open."
    ),
    upstream="unreported",
    affects={"transformers": ">=5.20,<6"},
    reproduce=_reproduce,
    applies=modules_with("is_flash_attention_requested"),
)
