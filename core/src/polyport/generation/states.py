"""The state that generation carries from step to step: caches as the components take and return them.

In generation every layer keeps all of its tokens, and the mask applies the windows: then one graph serves any length, and a
step never has to know how much of a window is filled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache

from polyport import structure
from polyport.caches import find_dtype
from polyport.errors import InputError
from polyport.metadata import ExportMetadata, TensorInfo
from polyport.structure import TreeSpec

#: What a layer of a cache is that keeps all tokens, for a layer that forgets those outside of its window.
_FULL = {
    "DynamicSlidingWindowLayer": "DynamicLayer",
    "StaticSlidingWindowLayer": "StaticLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer": "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer": "LinearAttentionAndStaticFullAttentionLayer",
}

#: Attributes of a layer that belong to the cache it lies in, and not to what a graph made of it.
_OWN = frozenset({"max_cache_len", "record_past", "device"})


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
    return next((room for layer in layers_of(cache) if (room := _room(layer)) is not None), None)


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
            room = max([length, *(room for layer in layers if (room := _room(layer)) is not None)])
            layers[:] = [_full(layer, room) for layer in layers]


def _room(layer: Any) -> int | None:
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


class Bridge:
    """Between a cache and the leaves that a component takes and returns.

    Args:
        metadata: The record of the component.
        kwarg: Name of the cache among the kwargs of forward.
    """

    def __init__(self, metadata: ExportMetadata, kwarg: str) -> None:
        self.infos = [
            (info, info.name.split(".")[1:]) for info in metadata.inputs if info.name.startswith(f"{kwarg}.")
        ]
        #: Caches that are as the component returns them, but for their tensors.
        self._settled: WeakSet[Cache] = WeakSet()
        self._places: list[list[str]] = []

    def read(self, cache: Cache, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors of a cache, by leaf; where there are none yet, empty ones.

        Args:
            cache: The cache.
            rows: Size of the batch.
            device: Where the empty ones are made.
        """
        found = {info.name: _at(cache, path) for info, path in self.infos}
        if any(tensor is None for tensor in found.values()):  # `in` would compare the tensors
            self.forget(cache)
        return {
            info.name: _blank(info, cache, path, rows, device)
            if (tensor := found[info.name]) is None
            else tensor
            for info, path in self.infos
        }

    def forget(self, cache: Cache) -> None:
        """A cache starts anew: nothing of it is taken for known."""
        self._settled.discard(cache)

    def write(self, cache: Cache, spec: TreeSpec, leaves: Sequence[Any]) -> Any:
        """Bring a cache up to date.

        Args:
            cache: The cache.
            spec: Structure of the cache that the component returned.
            leaves: Its leaves.

        Returns:
            See `put`.
        """
        if self.infos and cache in self._settled:  # at every token but the first, all else stays as it is
            for path, leaf in zip(self._places, leaves, strict=True):
                _set(cache, path, leaf)
            return cache
        value = put(cache, structure.unflatten(leaves, spec))
        if value is cache:
            self._places = [name.split(".") for name in structure.leaf_names(spec)]
            self._settled.add(cache)
        return value


def _set(cache: Any, path: list[str], leaf: Any) -> None:
    owner = cache
    for key in path[:-1]:
        owner = _inside(owner, key)
    last = path[-1]
    if isinstance(owner, dict):
        owner[int(last) if last.isdigit() else last] = leaf
    elif isinstance(owner, list):
        owner[int(last)] = leaf
    else:
        setattr(owner, last, leaf)


def _inside(value: Any, key: str) -> Any:
    if isinstance(value, (list, tuple)):
        return value[int(key)] if int(key) < len(value) else None
    if isinstance(value, Mapping):
        return value.get(int(key) if key.isdigit() else key)
    return getattr(value, key, None)


def _at(cache: Any, path: list[str]) -> torch.Tensor | None:
    value = cache
    for key in path:
        value = _inside(value, key)
    return value if isinstance(value, torch.Tensor) else None


def _blank(info: TensorInfo, cache: Any, path: list[str], rows: int, device: torch.device) -> torch.Tensor:
    layer = cache
    for key in path[:-1]:
        layer = _inside(layer, key)
    sizes = {0: rows, 2: _room(layer) or 0}
    shape = [size if isinstance(size, int) else sizes.get(axis, 0) for axis, size in enumerate(info.shape)]
    return torch.zeros(shape, dtype=find_dtype(info.dtype), device=device)


def put(cache: Any, made: Any) -> Any:
    """Give a cache the content of another one, which a graph made; its own settings stay.

    Args:
        cache: What the caller holds, and sees change as it does in eager.
        made: The new content.

    Returns:
        The cache. Where a model wraps what it gets into a cache for two kinds of attention, that, around the cache.
    """
    if hasattr(made, "self_attention_cache") and not hasattr(cache, "self_attention_cache"):
        made.self_attention_cache = put(cache, made.self_attention_cache)
        return made
    for key, value in vars(made).items():
        own = vars(cache).get(key)
        if key == "layers" and isinstance(own, list):
            _put_layers(own, value)
        elif isinstance(value, Cache) and isinstance(own, Cache):
            put(own, value)
        elif key == "is_updated":
            cache.is_updated = dict(value)
    return cache


def _put_layers(own: list[Any], made: list[Any]) -> None:
    for index, layer in enumerate(made):
        if index >= len(own):
            own.append(layer)
            continue
        if type(own[index]) is not type(layer):
            own[index] = layer
            continue
        target = vars(own[index])
        target.update(
            {key: value for key, value in vars(layer).items() if key not in _OWN or key not in target}
        )
        keys = target.get("keys")
        if isinstance(keys, torch.Tensor):
            target["device"] = keys.device
