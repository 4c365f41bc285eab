"""Caches as lists of tensors with names, and back.

A cache is an object with tensors inside. Its tensors become leaves, and everything else a description in JSON; the way back
creates the object without calling its constructor. Classes are looked up among those that transformers itself defines:
nothing is imported by a path that a file names.

The description is written the way transformers (>= 5.23) writes it, so that exports can be exchanged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from polyport.errors import ArtifactError, ExportError


def register_caches() -> None:
    """Make every cache class that transformers has defined so far a pytree node, as torch.export needs it.

    A registration lasts as long as the process: torch keeps compiled structures that refer to it. Classes that
    someone else registered before are left as they are.
    """
    for cls in _transformers_subclasses("cache"):
        if cls not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(
                cls,
                _flatten_cache,
                _unflatten_cache,
                serialized_type_name=_qualified(cls),
                flatten_with_keys_fn=_flatten_cache_with_keys,
                to_dumpable_context=str,
                from_dumpable_context=normal,
            )


def _flatten_cache(cache: Any) -> tuple[list[Any], str]:
    named, context = _encode_cache(cache)
    return [leaf for _, leaf in named], context


def _flatten_cache_with_keys(cache: Any) -> tuple[list[tuple[Any, Any]], str]:
    named, context = _encode_cache(cache)
    return [(pytree.MappingKey(name), leaf) for name, leaf in named], context


def _unflatten_cache(leaves: Iterable[Any], context: str) -> Any:
    return _decode(_skeleton(context), list(leaves))


@lru_cache(maxsize=256)
def _skeleton(context: str) -> Any:
    """The description of a cache, with attributes in the order of their tensors.

    JSON text is sorted by name; attributes that come back in another order than they went would be flattened in another
    order the next time.
    """
    return _ordered(json.loads(context))


def _ordered(value: Any) -> Any:
    if isinstance(value, list):
        return [_ordered(item) for item in value]
    if not isinstance(value, dict):
        return value
    items = {key: _ordered(item) for key, item in value.items()}
    if items.get("_t") == "obj":
        items["s"] = dict(sorted(items["s"].items(), key=lambda item: _first_leaf(item[1])))
    return items


def _first_leaf(value: Any) -> float:
    if isinstance(value, dict):
        return value["i"] if value.get("_t") == "tensor" else _first_leaf(list(value.values()))
    return min(map(_first_leaf, value), default=math.inf) if isinstance(value, list) else math.inf


def _encode_cache(cache: Any) -> tuple[list[tuple[str, Any]], str]:
    """The tensors inside a cache with their attribute paths, and everything else as JSON text (comparable, hashable)."""
    leaves: list[tuple[str, Any]] = []
    skeleton = _encode(cache, "", leaves)
    return leaves, json.dumps(skeleton, sort_keys=True)


def _encode(value: Any, path: str, leaves: list[tuple[str, Any]]) -> Any:
    if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        leaves.append((path, value))
        return {"_t": "tensor", "i": len(leaves) - 1}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.device):
        return {"_t": "device", "s": str(value)}
    if isinstance(value, torch.dtype):
        return {"_t": "dtype", "s": str(value).removeprefix("torch.")}
    if isinstance(value, list):
        return [_encode(item, _join(path, index), leaves) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {
            "_t": "tuple",
            "v": [_encode(item, _join(path, index), leaves) for index, item in enumerate(value)],
        }
    if isinstance(value, dict):
        pairs = [
            [_encode(key, "", []), _encode(item, _join(path, key), leaves)] for key, item in value.items()
        ]
        return {"_t": "dict", "v": pairs}
    if isinstance(value, type) and _is_ours(value):
        return {"_t": "class", "p": _qualified(value)}
    if _is_ours(type(value)):
        state = {key: _encode(item, _join(path, key), leaves) for key, item in vars(value).items()}
        return {"_t": "obj", "p": _qualified(type(value)), "s": state}
    raise ExportError(
        f"A cache holds {type(value).__module__}.{type(value).__qualname__} at {path!r}, which can't be part of an "
        "export. Offloaded and quantized caches can't be exported; use a DynamicCache or a StaticCache.",
        stage="capture",
    )


def normal(context: str) -> str:
    """The one spelling of a context that equal caches share, whoever wrote it."""
    return json.dumps(json.loads(context), sort_keys=True)


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _decode(value: Any, leaves: list[Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, leaves) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get("_t"):
        case "tensor":
            return leaves[value["i"]]
        case "device":
            return torch.device(value["s"])
        case "dtype":
            return find_dtype(value["s"])
        case "tuple":
            return tuple(_decode(item, leaves) for item in value["v"])
        case "dict":
            return {_decode(key, []): _decode(item, leaves) for key, item in value["v"]}
        case "class":
            return find_class(value["p"])
        case "obj":
            cls = find_class(value["p"])
            instance: Any = object.__new__(cls)
            instance.__dict__.update({key: _decode(item, leaves) for key, item in value["s"].items()})
            return instance
        case other:
            raise ArtifactError(
                f"The export describes a cache with a value of unknown kind {other!r}.", stage="load"
            )


def find_dtype(name: Any) -> torch.dtype:
    """The torch dtype of that name (`"float32"`), as files name it.

    Raises:
        ArtifactError: torch has none.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ArtifactError(f"The export names a dtype {name!r} that torch doesn't have.", stage="load")
    return dtype


def check_description(cls: type, context: Any, count: int) -> None:
    """Refuse what unflattening would refuse later: the description must make that very class, of every leaf once."""
    marks = [object() for _ in range(count)]
    made = _decode(context, marks)
    used = [id(leaf) for leaf in _leaves_in(context, marks)]
    if type(made) is not cls or sorted(used) != sorted(map(id, marks)):
        raise ValueError(f"the description of a {cls.__name__} does not fit its {count} tensors")


def _leaves_in(skeleton: Any, leaves: list[Any]) -> Iterator[Any]:
    if isinstance(skeleton, list):
        for item in skeleton:
            yield from _leaves_in(item, leaves)
    elif isinstance(skeleton, dict):
        if skeleton.get("_t") == "tensor":
            yield leaves[skeleton["i"]]
        else:
            for item in skeleton.values():
                yield from _leaves_in(item, leaves)


# ── the closed list of classes ──────────────────────────────────────────────────────────────────────────────────────


def roots(kind: str) -> tuple[type, ...]:
    """The classes that all `"output"`s, `"cache"`s, and parts of caches (`"layer"`) of transformers derive from."""
    from transformers import cache_utils
    from transformers.utils import ModelOutput

    if kind == "output":
        return (ModelOutput,)
    if kind == "cache":
        return (cache_utils.Cache,)
    names = ("CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer")
    layers = tuple(getattr(cache_utils, name) for name in names if hasattr(cache_utils, name))
    return (cache_utils.Cache, *layers)


def _transformers_subclasses(kind: str) -> Iterator[type]:
    """Classes of a kind that the transformers package itself defines, as far as they are imported."""
    seen: set[type] = set()
    stack = list(roots(kind))
    while stack:
        cls = stack.pop()
        if cls in seen:
            continue
        seen.add(cls)
        stack.extend(cls.__subclasses__())
        if cls.__module__.split(".")[0] == "transformers":
            yield cls


def _is_ours(cls: type) -> bool:
    return issubclass(cls, roots("layer")) and cls.__module__.split(".")[0] == "transformers"


def _qualified(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


_FOUND: dict[str, type] = {}


def find_class(path: Any) -> type:
    """The transformers output, cache or cache-layer class of that path.

    Args:
        path: `module.Class` (outputs) or `module:Class` (caches), as files name them.

    Raises:
        ArtifactError: transformers defines no such class, or its module was not imported: the model's class must be
            looked up first, which imports the module that defines its outputs.
    """
    wanted = str(path).replace(":", ".")
    if wanted in _FOUND:  # a cache is put together again at every step of a generation
        return _FOUND[wanted]
    for kind in ("output", "layer"):
        for cls in _transformers_subclasses(kind):
            if f"{cls.__module__}.{cls.__qualname__}" == wanted:
                _FOUND[wanted] = cls
                return cls
    raise ArtifactError(
        f"The export names the class {path!r}, which is no output or cache class of the installed transformers. "
        "The export was made with another version, or it is not safe to load.",
        stage="load",
    )
