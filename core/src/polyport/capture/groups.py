"""Axes of the inputs, grouped by what they count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

#: What an axis counts, which decides how a sample is made longer along it.
Kind = Literal["lead", "tokens", "past", "pixels", "free", "fixed"]


@attrs.frozen
class Group:
    """Axes that move together.

    Args:
        name: Name of the axis (`batch`, `sequence`, `past`...).
        kind: What it counts.
        size: Its size in the sample.
        sure: Whether such an axis varies in any model that has one; others are asked one by one.
    """

    name: str
    kind: Kind
    size: int
    sure: bool = True


@attrs.frozen
class Layout:
    """Every axis that may vary.

    Args:
        axes: Leaf -> {axis index: names of the groups whose sizes add up to it} (a mask over a cache covers
            `past` and `sequence`).
        groups: Name -> group.
    """

    axes: Mapping[str, Mapping[int, tuple[str, ...]]]
    groups: Mapping[str, Group]

    def pinned(self, names: frozenset[str]) -> Layout:
        """The layout with those groups fixed to the sample's size."""
        groups = {
            name: attrs.evolve(group, kind="fixed") if name in names else group
            for name, group in self.groups.items()
        }
        return Layout(self.axes, groups)

    def only(self, names: set[str]) -> Layout:
        """The layout with just these groups; the others count with their size (`past+1`)."""
        axes: dict[str, dict[int, tuple[str, ...]]] = {}
        for leaf, dims in self.axes.items():
            kept = {dim: terms for dim, terms in dims.items() if names.intersection(terms)}
            axes[leaf] = {
                dim: tuple(term if term in names else str(self.groups[term].size) for term in terms)
                for dim, terms in kept.items()
            }
        return Layout(axes, {name: group for name, group in self.groups.items() if name in names})
