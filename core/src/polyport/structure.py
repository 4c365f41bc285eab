"""Nested inputs and outputs as flat lists of named leaves, and back.

A graph takes and returns flat lists of tensors; a model takes and returns dicts, `ModelOutput`s and caches. This module
goes between the two with torch's pytrees, gives every leaf one dotted name (`cache.layers.0.keys`) that all formats share,
and writes the structure as JSON.

What comes back from JSON is data. Only builtin containers, `ModelOutput`s, caches and cache layers are rebuilt, and the
latter three are looked up among the classes that transformers itself defines: nothing is imported by a path that a file
names, and no constructor of a cache is called.

The JSON is the one of `torch.utils._pytree.treespec_dumps`, and a cache is written the way transformers (>= 5.23)
writes it, so that exports can be exchanged.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from polyport.errors import ArtifactError, ExportError

#: Version of the treespec JSON that torch writes and we read.
_TREESPEC_VERSION = 1

#: Deepest nesting and most nodes read from a file: far above any model's, low enough to bound the work.
_MAX_DEPTH, _MAX_NODES = 64, 100_000

_BUILTINS: dict[str, type] = {
    "builtins.tuple": tuple,
    "builtins.list": list,
    "builtins.dict": dict,
    "collections.OrderedDict": OrderedDict,
}

TreeSpec = pytree.TreeSpec


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of `value`, depth first, and the structure that puts them back (`unflatten`)."""
    register_caches()
    return pytree.tree_flatten(value)


def unflatten(leaves: Iterable[Any], spec: TreeSpec) -> Any:
    """The nested value again."""
    return pytree.tree_unflatten(leaves, spec)


def flatten_named(value: Any) -> list[tuple[str, Any]]:
    """The leaves of `value` with their dotted names, in the order of `flatten`."""
    register_caches()
    leaves, _ = pytree.tree_flatten_with_path(value)
    return [(".".join(_key_name(key) for key in path), leaf) for path, leaf in leaves]


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


# ── caches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


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
                from_dumpable_context=_normal,
            )


def _flatten_cache(cache: Any) -> tuple[list[Any], str]:
    named, context = _encode_cache(cache)
    return [leaf for _, leaf in named], context


def _flatten_cache_with_keys(cache: Any) -> tuple[list[tuple[Any, Any]], str]:
    named, context = _encode_cache(cache)
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in named], context


def _unflatten_cache(leaves: Iterable[Any], context: str) -> Any:
    return _decode(json.loads(context), list(leaves))


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


def _normal(context: str) -> str:
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
            return _dtype(value["s"])
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


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ArtifactError(f"The export names a dtype {name!r} that torch doesn't have.", stage="load")
    return dtype


# ── the closed list of classes ──────────────────────────────────────────────────────────────────────────────────────


def _roots(kind: str) -> tuple[type, ...]:
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
    stack = list(_roots(kind))
    while stack:
        cls = stack.pop()
        if cls in seen:
            continue
        seen.add(cls)
        stack.extend(cls.__subclasses__())
        if cls.__module__.split(".")[0] == "transformers":
            yield cls


def _is_ours(cls: type) -> bool:
    return issubclass(cls, _roots("layer")) and cls.__module__.split(".")[0] == "transformers"


def _qualified(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def find_class(path: Any) -> type:
    """The transformers output, cache or cache-layer class of that path.

    Args:
        path: `module.Class` (outputs) or `module:Class` (caches), as files name them.

    Raises:
        ArtifactError: transformers defines no such class, or its module was not imported: the model's class must be
            looked up first, which imports the module that defines its outputs.
    """
    wanted = str(path).replace(":", ".")
    for kind in ("output", "layer"):
        for cls in _transformers_subclasses(kind):
            if f"{cls.__module__}.{cls.__qualname__}" == wanted:
                return cls
    raise ArtifactError(
        f"The export names the class {path!r}, which is no output or cache class of the installed transformers. "
        "The export was made with another version, or it is not safe to load.",
        stage="load",
    )


# ── JSON ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def dump_structure(spec: TreeSpec) -> str:
    """The structure as JSON text."""
    return pytree.treespec_dumps(spec)


def load_structure(text: str) -> TreeSpec:
    """The structure again, from JSON text out of a file.

    Raises:
        ArtifactError: The text is damaged, of another version, or names a class outside the closed list.
    """
    register_caches()
    try:
        version, node = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ArtifactError(f"The export's call structure is not readable: {error}.", stage="load") from error
    if version != _TREESPEC_VERSION:
        raise ArtifactError(
            f"The export's call structure has version {version!r}, not {_TREESPEC_VERSION}.", stage="load"
        )
    budget = [_MAX_NODES]
    try:
        return _load_node(node, 0, budget)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ArtifactError(f"The export's call structure is damaged: {error!r}.", stage="load") from error


def _load_node(node: Mapping[str, Any], depth: int, budget: list[int]) -> TreeSpec:
    budget[0] -= 1
    if depth > _MAX_DEPTH or budget[0] < 0:
        raise ArtifactError("The export's call structure is larger than any model's.", stage="load")
    if node["type"] is None:
        return pytree.treespec_leaf()
    children = [_load_node(child, depth + 1, budget) for child in node["children_spec"]]
    cls = _BUILTINS.get(node["type"]) or find_class(node["type"])
    context = json.loads(node["context"])
    if ":" in node["type"]:
        _decode(context, [None] * len(children))  # refuses what an unflatten would refuse later
        context = _normal(node["context"])
    elif cls in (tuple, list):
        context = None
    elif not isinstance(context, list) or not all(isinstance(key, (str, int)) for key in context):
        raise ArtifactError(f"The export's call structure has no keys for {node['type']!r}.", stage="load")
    elif len(context) != len(children):
        raise ArtifactError(
            f"The export's call structure has too few keys for {node['type']!r}.", stage="load"
        )
    return pytree.TreeSpec(cls, context, children)
