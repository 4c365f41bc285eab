"""Outputs that are as many as something is long: one tensor per image, say.

A graph has a fixed number of outputs, so such a tuple comes out of it in one tensor, the pieces one after the other. The record
says which axis they are counted by, and a call cuts the tensor again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from polyport.errors import ArtifactError
from polyport.structure import TreeSpec


def find_pieces(found: Any, wanted: Any, sizes: Mapping[str, int]) -> dict[int, str]:
    """Which leaves of a trace's outputs hold pieces.

    Args:
        found: What the traced graph returns (tensors of any kind, fake ones too).
        wanted: What the model returns for the same inputs.
        sizes: Axis name -> its size in these inputs.

    Returns:
        Leaf index in `found` -> name of the axis that counts the pieces; empty where the two agree or differ otherwise.
    """
    leaves, spec = pytree.tree_flatten(found)
    pieces: dict[int, str] = {}
    _compare(
        spec,
        pytree.tree_structure(wanted),
        iter(pytree.tree_leaves(wanted)),
        iter(range(len(leaves))),
        sizes,
        pieces,
    )
    return pieces


def _compare(
    found: TreeSpec,
    wanted: TreeSpec,
    values: Any,
    indices: Any,
    sizes: Mapping[str, int],
    pieces: dict[int, str],
) -> None:
    if found.is_leaf() and wanted.is_leaf():
        next(values), next(indices)
        return
    ours, theirs = found.children(), wanted.children()
    if found.type in (tuple, list) and len(ours) == 1 != len(theirs) and ours[0].is_leaf():
        index, parts = next(indices), [next(values) for _ in range(wanted.num_leaves)]
        counted = [name for name in (*("images", "batch"), *sizes) if sizes.get(name) == len(theirs)]
        alike = len({tuple(part.shape) for part in parts if isinstance(part, torch.Tensor)}) == 1
        if counted and alike and len(parts) == len(theirs):
            pieces[index] = counted[0]
        return
    if found.type is not wanted.type or found.context != wanted.context or len(ours) != len(theirs):
        for _ in range(wanted.num_leaves):
            next(values)
        for _ in range(found.num_leaves):
            next(indices)
        return
    for one, other in zip(ours, theirs, strict=True):
        _compare(one, other, values, indices, sizes, pieces)


def cutter(pieces: Mapping[int, str], spec: TreeSpec) -> Callable[[Sequence[Any], Mapping[str, int]], Any]:
    """What puts the leaves of a call into their structure, cutting those that hold pieces.

    Args:
        pieces: As `find_pieces` returns it.
        spec: Structure of the outputs, where each tuple of pieces has one leaf.

    Raises:
        ArtifactError: A leaf is none of the structure's, or is not alone in a tuple or list.
    """
    alone = set(_alone(spec, iter(range(spec.num_leaves))))
    if not pieces.keys() <= alone:
        raise ArtifactError(
            f"The export cuts the outputs {sorted(pieces)} into pieces, which have no place.", stage="load"
        )

    def assemble(leaves: Sequence[Any], sizes: Mapping[str, int]) -> Any:
        counts = {index: sizes[name] for index, name in pieces.items()}
        flat: list[Any] = []
        for index, leaf in enumerate(leaves):
            count = counts.get(index)
            flat += [leaf] if count is None else leaf.tensor_split(count)
        return pytree.tree_unflatten(flat, _widened(spec, iter(range(spec.num_leaves)), counts))

    return assemble


def _alone(spec: TreeSpec, indices: Any) -> list[int]:
    if spec.is_leaf():
        next(indices)
        return []
    children = spec.children()
    if spec.type in (tuple, list) and len(children) == 1 and children[0].is_leaf():
        return [next(indices)]
    return [index for child in children for index in _alone(child, indices)]


def _widened(spec: TreeSpec, indices: Any, counts: Mapping[int, int]) -> TreeSpec:
    """The structure with as many leaves in each tuple of pieces as there are pieces."""
    if spec.is_leaf():
        next(indices)
        return spec
    children = spec.children()
    if spec.type in (tuple, list) and len(children) == 1 and children[0].is_leaf():
        count = counts.get(next(indices), 1)
        return pytree.TreeSpec(spec.type, spec.context, [children[0]] * count)
    return pytree.TreeSpec(spec.type, spec.context, [_widened(child, indices, counts) for child in children])
