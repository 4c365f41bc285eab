"""Samples of other sizes, made from the caller's own by repeating what is in it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from polyport.capture.groups import Group, Layout


def resized(
    leaves: Mapping[str, torch.Tensor],
    layout: Layout,
    sizes: Mapping[str, int],
    copies: int,
    special: set[int],
) -> dict[str, torch.Tensor]:
    """The sample at other sizes.

    Args:
        leaves: The input tensors by name.
        layout: Their axes.
        sizes: Group -> new size, for groups that change; leading axes go by `copies`.
        copies: How often everything is concatenated with itself along its leading axis. Packed image patches and
            their grids stay consistent that way, whatever they hold.
        special: Token ids that must be neither repeated nor dropped.

    Returns:
        New tensors by name; those that don't change are the given ones.
    """
    maps: dict[str, torch.Tensor] = {}
    for name, group in layout.groups.items():
        target = group.size * copies if group.kind == "lead" else sizes.get(name, group.size)
        if target != group.size:
            maps[name] = _map(group, target, leaves, layout, special)
    grown = {}
    for name, leaf in leaves.items():
        value = leaf
        for dim, terms in layout.axes.get(name, {}).items():
            if any(term in maps for term in terms):
                value = value.index_select(dim, _joined(terms, maps, layout).to(leaf.device))
                value = _renumbered(name, leaf, value, dim, layout, sizes)
        grown[name] = value.clone() if value is leaf else value
    return grown


def _joined(terms: tuple[str, ...], maps: Mapping[str, torch.Tensor], layout: Layout) -> torch.Tensor:
    parts, start = [], 0
    for term in terms:
        size = int(term) if term.isdigit() else layout.groups[term].size  # a part that keeps its size
        parts.append(maps.get(term, torch.arange(size)) + start)
        start += size
    return torch.cat(parts)


def _map(
    group: Group, target: int, leaves: Mapping[str, torch.Tensor], layout: Layout, special: set[int]
) -> torch.Tensor:
    """Old index of every new position."""
    positions = torch.arange(group.size)
    if group.kind != "tokens":
        return torch.arange(target) % max(group.size, 1)
    ordinary = _ordinary(group, leaves, layout, special)
    if target >= group.size:
        at = int(ordinary[0]) if len(ordinary) else group.size - 1
        extra = torch.full((target - group.size,), at)
        return torch.cat([positions[: at + 1], extra, positions[at + 1 :]])
    dropped = set(ordinary[: group.size - target].tolist()) if len(ordinary) else set()
    return torch.tensor([i for i in range(group.size) if i not in dropped])[:target]


def _ordinary(
    group: Group, leaves: Mapping[str, torch.Tensor], layout: Layout, special: set[int]
) -> torch.Tensor:
    """Positions that hold a plain token in every row: they may be repeated without changing what the text refers to."""
    plain = torch.ones(group.size, dtype=torch.bool)
    for name, dims in layout.axes.items():
        base = name.split(".")[0]
        for dim, terms in dims.items():
            if terms != (group.name,) or leaves[name].is_floating_point():
                continue
            rows = leaves[name].movedim(dim, -1).reshape(-1, group.size).cpu()
            if base.endswith("input_ids"):
                for token in special:
                    plain &= (rows != token).all(0)
            elif base.endswith("mask") and leaves[name].dim() == 2:
                plain &= (rows != 0).all(0)
            elif base == "mm_token_type_ids":
                plain &= (rows == 0).all(0)
    return plain.nonzero().flatten()


def _renumbered(
    name: str, before: torch.Tensor, after: torch.Tensor, dim: int, layout: Layout, sizes: Mapping[str, int]
) -> torch.Tensor:
    """Positions that counted on by one still do, and start after a cache of the new length."""
    base = name.split(".", maxsplit=1)[0]
    groups = [layout.groups.get(term) for term in layout.axes[name][dim]]  # None: a part that keeps its size
    tokens = [group for group in groups if group is not None and group.kind == "tokens"]
    if not tokens or not base.endswith(("position_ids", "cache_position")) or after.is_floating_point():
        return after
    if before.shape[dim] > 1 and not bool((before.diff(dim=dim) == 1).all()):
        return after
    past = layout.groups.get("past")
    shift = sizes.get("past", past.size) - past.size if past is not None else 0
    steps = torch.arange(after.shape[dim], device=after.device)
    shape = [1] * after.dim()
    shape[dim] = -1
    return after.narrow(dim, 0, 1) + shift + steps.view(shape)
