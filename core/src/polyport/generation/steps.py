"""Several tokens in one step, and one step taken token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from polyport import structure


def token_axis(name: str, value: Any) -> int | None:
    """The axis of an argument that counts the tokens of the step; None where it has none.

    Args:
        name: Dotted name of the leaf.
        value: The leaf.
    """
    base = name.split(".", maxsplit=1)[0]
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return None
    if base.startswith("encoder_") or base == "logits_to_keep":
        return None
    if base.endswith(("input_ids", "position_ids", "token_type_ids")):
        return value.dim() - 1
    if base.endswith("inputs_embeds"):
        return 1
    if base == "cross_attention_mask":
        return 1
    if base.endswith("attention_mask") and value.dim() == 4:
        return 2
    return None


def merged(first: Mapping[str, Any], second: Mapping[str, Any], cache: str | None) -> dict[str, Any]:
    """Two steps of one token each as one step of two.

    Args:
        first: Forward kwargs of the first step.
        second: Those of the next.
        cache: Name of the cache among them, which stays the first step's.
    """
    leaves = dict(structure.flatten_named(_without(second, cache)))
    both: dict[str, Any] = {}
    for kwarg, value in first.items():
        if kwarg == cache:
            both[kwarg] = value
            continue
        named = structure.flatten_named({kwarg: value})
        _, spec = structure.flatten(value)
        both[kwarg] = structure.unflatten(
            [_joined(name, leaf, leaves.get(name)) for name, leaf in named], spec
        )
    return both


def _without(kwargs: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != name}


def _joined(name: str, one: Any, other: Any) -> Any:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one
    axis = token_axis(name, one)
    if axis is None:
        return other  # a mask over the whole length, which the second step has in full
    missing = other.shape[-1] - one.shape[-1]
    if one.dim() == 4 and missing > 0:
        # the first token doesn't see the second
        hidden = False if one.dtype == torch.bool else torch.finfo(one.dtype).min
        one = torch.nn.functional.pad(one, (0, missing), value=hidden)
    return torch.cat([one, other], dim=axis)


def one_token(
    kwargs: Mapping[str, Any], index: int, count: int, cache: str | None, growing: bool
) -> dict[str, Any]:
    """The arguments of one token's step, out of those of a step of several.

    Args:
        kwargs: Forward kwargs of the step.
        index: Which of its tokens.
        count: How many there are.
        cache: Name of the cache among them.
        growing: Whether the masks end with the last token, and not with the buffers of a static cache.
    """
    own_mask = "decoder_attention_mask" if "decoder_input_ids" in kwargs else "attention_mask"
    later = count - 1 - index if growing else 0

    def taken(name: str, leaf: Any) -> Any:
        axis = token_axis(name, leaf)
        if axis is not None and leaf.shape[axis] == count:
            leaf = leaf.narrow(axis, index, 1)
        if later and name.split(".", maxsplit=1)[0] == own_mask and isinstance(leaf, torch.Tensor):
            leaf = leaf.narrow(-1, 0, leaf.shape[-1] - later)
        return leaf

    single: dict[str, Any] = {}
    for kwarg, value in kwargs.items():
        if kwarg == cache:
            single[kwarg] = value
        elif kwarg != "logits_to_keep":
            named = structure.flatten_named({kwarg: value})
            _, spec = structure.flatten(value)
            single[kwarg] = structure.unflatten([taken(name, leaf) for name, leaf in named], spec)
    return single
