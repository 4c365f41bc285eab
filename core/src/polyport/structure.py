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
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from polyport.caches import check_description, find_class, normal, register_caches, roots
from polyport.errors import ArtifactError

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


def leaf_names(spec: TreeSpec) -> list[str]:
    """Dotted names of the leaves that `unflatten` puts into `spec`, in order."""
    # a cache tells its tensors from its numbers, so what stands in for the leaves must be tensors
    stand_ins = [torch.empty(0, device="meta") for _ in range(spec.num_leaves)]
    names = {id(leaf): name for name, leaf in flatten_named(unflatten(stand_ins, spec))}
    return [names[id(leaf)] for leaf in stand_ins]


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
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        # RuntimeError: a device that torch doesn't know, or (RecursionError) a context nested too deep
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
    if issubclass(cls, roots("cache")):
        check_description(cls, context, len(children))
        context = normal(node["context"])
    elif cls in (tuple, list):
        if context is not None:
            raise ValueError(f"a {cls.__name__} has the context {context!r}")
    else:
        _check_keys(cls, context, children)
    return pytree.TreeSpec(cls, context, children)


def _check_keys(cls: type, keys: Any, children: list[TreeSpec]) -> None:
    """Refuse keys that a dict or an output class can't have."""
    if not isinstance(keys, list) or not all(isinstance(key, (str, int)) for key in keys):
        raise ValueError(f"a {cls.__name__} has no keys")
    if len(keys) != len(children) or len(set(keys)) != len(keys):
        raise ValueError(f"a {cls.__name__} has {len(keys)} keys for {len(children)} values, or one twice")
    if issubclass(cls, roots("output")):
        fields = getattr(cls, "__dataclass_fields__", {})
        if unknown := [key for key in keys if key not in fields]:
            raise ValueError(f"{cls.__name__} has no field {unknown[0]!r}")
    elif cls not in (dict, OrderedDict):
        raise ValueError(f"{cls.__name__} is no container of a call")
