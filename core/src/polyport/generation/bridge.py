"""Between a cache and the tensors that a component takes and returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.cache_utils import Cache

from polyport import structure
from polyport.caches import find_dtype
from polyport.generation import states
from polyport.metadata import ExportMetadata, TensorInfo
from polyport.structure import TreeSpec

#: Attributes of a layer that belong to the cache it lies in, and not to what a graph made of it.
_OWN = frozenset({"max_cache_len", "record_past", "device"})


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
        self._names = [info.name for info, _ in self.infos]
        #: Caches that are as the component returns them, but for their tensors.
        self._settled: WeakKeyDictionary[Cache, _Settled] = WeakKeyDictionary()

    def read(self, cache: Cache, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors of a cache, by leaf; where there are none yet, empty ones.

        Args:
            cache: The cache.
            rows: Size of the batch.
            device: Where the empty ones are made.
        """
        settled = self._settled.get(cache)
        if settled is not None and (tensors := settled.read(cache)) is not None:
            return dict(zip(self._names, tensors, strict=True))
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
        self._settled.pop(cache, None)

    def write(self, cache: Cache, spec: TreeSpec, leaves: Sequence[Any]) -> Any:
        """Bring a cache up to date.

        Args:
            cache: The cache.
            spec: Structure of the cache that the component returned.
            leaves: Its leaves.

        Returns:
            See `put`.
        """
        settled = self._settled.get(cache)
        if settled is not None:  # at every token but the first, all else stays as it is
            settled.write(cache, leaves)
            return cache
        value = put(cache, structure.unflatten(leaves, spec))
        if value is cache and self.infos:
            outputs = [name.split(".") for name in structure.leaf_names(spec)]
            self._settled[cache] = _Settled(cache, [path for _, path in self.infos], outputs)
        return value


class _Settled:
    """Where the leaves of a cache are. To walk to each of them takes longer than all else that is done with it.

    Args:
        cache: The cache.
        inputs: Paths of the leaves that a component takes.
        outputs: Paths of those that it returns.
    """

    def __init__(
        self, cache: Cache, inputs: Sequence[Sequence[str]], outputs: Sequence[Sequence[str]]
    ) -> None:
        self._outputs = outputs
        self._layers = _layers(cache)
        taken, returned = ([_attribute(cache, path) for path in paths] for paths in (inputs, outputs))
        #: Attributes of layers, each with the dict that it is in; None where some leaf is none.
        self._known = None if None in (*taken, *returned) else (taken, returned)

    def read(self, cache: Cache) -> list[torch.Tensor] | None:
        """The tensors that a component takes; None where they have to be looked for."""
        if self._known is None or _layers(cache) != self._layers:
            return None
        found = [attributes[key] for attributes, key in self._known[0]]
        return found if all(isinstance(tensor, torch.Tensor) for tensor in found) else None

    def write(self, cache: Cache, leaves: Sequence[Any]) -> None:
        """Put the leaves that a component returned into the cache."""
        if self._known is not None and _layers(cache) == self._layers:
            for (attributes, key), leaf in zip(self._known[1], leaves, strict=True):
                attributes[key] = leaf
        else:
            for path, leaf in zip(self._outputs, leaves, strict=True):
                _set(cache, path, leaf)


def _layers(cache: Cache) -> list[Any]:
    return list(states.layers_of(cache))


def _attribute(cache: Any, path: Sequence[str]) -> Any:
    """The attributes of a layer and the name among them that a path leads to; None where it leads further inside."""
    owner = cache
    for key in path[:-1]:
        owner = _inside(owner, key)
    return (vars(owner), path[-1]) if hasattr(owner, "__dict__") and owner in _layers(cache) else None


def _set(cache: Any, path: Sequence[str], leaf: Any) -> None:
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
    sizes = {0: rows, 2: states.room_of(layer) or 0}
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
