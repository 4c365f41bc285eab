"""The state that generation carries from step to step: caches as the components take and return them.

In generation every layer keeps all of its tokens, and the mask applies the windows: then one graph serves any length, and a
step never has to know how much of a window is filled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache

from polyport import structure
from polyport.errors import InputError

#: What a layer of a cache is that keeps all tokens, for a layer that forgets those outside of its window.
_FULL = {
    "DynamicSlidingWindowLayer": "DynamicLayer",
    "StaticSlidingWindowLayer": "StaticLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer": "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer": "LinearAttentionAndStaticFullAttentionLayer",
}


def parts(cache: Any) -> Iterator[Cache]:
    """The caches inside one: itself, or the two of an encoder-decoder's."""
    own = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    yield from (part for part in own if part is not None)
    if own == [None, None]:
        yield cache


def layers_of(cache: Any) -> Iterator[Any]:
    """The layers of the caches inside one; none where it is no cache."""
    for part in parts(cache):
        yield from getattr(part, "layers", ())


def room_in(cache: Any) -> int | None:
    """For how many tokens a static cache has room, cached ones included; None where a cache grows, or is none."""
    return next((room for layer in layers_of(cache) if (room := room_of(layer)) is not None), None)


def keep_all_tokens(cache: Any, length: int = 0) -> None:
    """Turn the layers of a cache that keep a window into ones that keep everything, in place.

    What a filled layer has forgotten comes back as zeros: no mask lets anything see it.

    Args:
        cache: The cache; None and states of other kinds are left alone.
        length: Tokens that a static cache must have room for. Where all of its layers keep windows, nothing in it says.

    Raises:
        InputError: A static cache is filled, or its length is not known.
    """
    for part in parts(cache):
        layers = getattr(part, "layers", None)
        if isinstance(layers, list):
            room = max([length, *(room for layer in layers if (room := room_of(layer)) is not None)])
            layers[:] = [_full(layer, room) for layer in layers]


def room_of(layer: Any) -> int | None:
    """For how many tokens a layer of a static cache has room; None where it grows."""
    length = getattr(layer, "max_cache_len", None)
    return length if isinstance(length, int) else None


def with_all_tokens(prepare: Any) -> Any:
    """`_prepare_cache_for_generation` of a model, with caches that keep all tokens."""

    def keeping(
        generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch: int, max_length: int
    ) -> Any:
        result = prepare(generation_config, model_kwargs, mode, batch, max_length)
        length = max(max_length, getattr(generation_config, "max_cache_len", None) or 0)
        keep_all_tokens(model_kwargs.get("cache"), length)
        return result

    return keeping


def _full(layer: Any, room: int) -> Any:
    name = _FULL.get(type(layer).__name__)
    cls = getattr(cache_utils, name, None) if name else None
    if cls is None:
        return layer
    full = object.__new__(cls)
    full.__dict__.update(vars(layer))
    seen = full.__dict__.pop("cumulative_length", None)
    for key in ("sliding_window", "_sliding_window_tensor"):
        full.__dict__.pop(key, None)
    if isinstance(seen, torch.Tensor):
        full.cumulative_length = seen  # a static layer counts its tokens, too
        full.__dict__.pop("cumulative_length_int", None)
        if layer.is_initialized or room <= layer.max_cache_len:
            raise InputError(
                "A static cache whose layers keep a sliding window can't be used here: an export keeps all tokens. Pass "
                'cache_implementation="static" in place of a cache.',
                stage="run",
            )
        full.max_cache_len = room
    elif layer.is_initialized and (missing := seen - layer.keys.shape[-2]) > 0:
        for key in ("keys", "values"):
            tensor = getattr(layer, key)
            gap = tensor.new_zeros((*tensor.shape[:2], missing, tensor.shape[-1]))
            setattr(full, key, torch.cat([gap, tensor], dim=-2))
    return full


def tokens_in(cache: Any) -> int:
    """How many tokens a cache has seen: 0 where nothing is in it, 1 where only a recurrent state says that there were some."""
    if not isinstance(cache, Cache):
        return 0 if cache is None else 1
    for layer in layers_of(next(parts(cache))):
        state = getattr(layer, "has_previous_state", None)
        if isinstance(state, dict) and any(state.values()):
            return 1
        if getattr(layer, "is_initialized", False) and hasattr(layer, "get_seq_length"):
            return int(layer.get_seq_length())
    return 0


def recurrent(cache: Any) -> bool:
    """Whether some layer keeps a state in place of keys and values."""
    mixin = cache_utils.LinearAttentionCacheLayerMixin
    return isinstance(cache, Cache) and any(isinstance(layer, mixin) for layer in layers_of(cache))


def emptied(cache: Any) -> Any:
    """A copy of a filled static cache with nothing in it."""
    leaves, spec = structure.flatten(cache)
    empty = structure.unflatten(
        [torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
    )
    for index in getattr(empty, "is_updated", {}):
        empty.is_updated[index] = False
    for layer in layers_of(empty):
        if isinstance(state := getattr(layer, "has_previous_state", None), dict):
            layer.has_previous_state = dict.fromkeys(state, False)
    return empty
