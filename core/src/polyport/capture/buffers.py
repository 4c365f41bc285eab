"""Static caches whose buffers have another size than the cache was made for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def true_lengths(kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Let static caches say the length of the buffers they hold, for the body of a `with`.

    A `StaticCache` keeps its length as a number beside the buffers and builds masks from that number. With buffers of
    another size, or of an open one, the number must follow; afterwards it is the old one again, since it is part of the
    call's structure.
    """
    kept = []
    for value in kwargs.values():
        for layer in _layers(value):
            keys = getattr(layer, "keys", None)
            if getattr(keys, "dim", lambda: 0)() == 4 and not getattr(layer, "is_sliding", False):
                kept.append((layer, layer.max_cache_len))
                layer.max_cache_len = keys.shape[-2]  # type: ignore[union-attr]
    try:
        yield
    finally:
        for layer, length in kept:
            layer.max_cache_len = length


def _layers(value: Any) -> Iterator[Any]:
    for part in (
        value,
        getattr(value, "self_attention_cache", None),
        getattr(value, "cross_attention_cache", None),
    ):
        layers = vars(part).get("layers") if hasattr(part, "__dict__") else None
        if isinstance(layers, list):
            yield from (layer for layer in layers if isinstance(vars(layer).get("max_cache_len"), int))
