"""Other inputs of a model, made from a sample by changing what an export leaves open: batch, lengths, image sizes, padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from polyport import structure
from polyport.capture import rebuilt, tensor_leaves
from polyport.capture.configs import placeholders
from polyport.capture.groups import Group, Layout
from polyport.capture.layout import propose
from polyport.capture.resize import resized
from polyport.metadata import AxisRange


def variations(
    model: Any, sample: Mapping[str, Any], axes: Mapping[str, AxisRange]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The sample, and copies of it at other sizes along the axes that an export leaves open, within their limits.

    Args:
        model: The model.
        sample: Its prepared kwargs.
        axes: Name of an axis of the export -> the sizes it takes.

    Yields:
        What is special about it, and the kwargs.
    """
    yield "sample", copied(sample)
    leaves = tensor_leaves(sample)
    special = placeholders(model.config)
    layout = propose(leaves, special).only(set(axes))
    lead = [group for group in layout.groups.values() if group.kind == "lead"]
    most = _copies(lead, axes)
    for name, sizes, copies in _plans(layout, axes, most):
        grown = resized(leaves, layout, sizes, copies, special)
        yield name, rebuilt(sample, grown)
    if lead and _within(axes, "batch", 1) == 1 and (single := _first_row(leaves, layout)):
        yield "batch 1", rebuilt(sample, single)
    mask = leaves.get("attention_mask")
    if mask is not None and mask.dim() == 2 and not mask.is_floating_point() and mask.shape[1] > 2 and lead:
        grown = resized(leaves, layout, {}, min(2, most), special)
        for side in ("left", "right"):
            padded = dict(grown)
            padded["attention_mask"] = _padded(grown["attention_mask"], side)
            yield f"{side} padding", rebuilt(sample, padded)


def _plans(
    layout: Layout, axes: Mapping[str, AxisRange], most: int
) -> Iterator[tuple[str, dict[str, int], int]]:
    """What is special about a copy, its sizes, and how often the sample is in its batch: `most` times at most."""
    if most > 1:
        yield f"batch x{most}", {}, most
    for group in layout.groups.values():
        if group.kind in ("tokens", "past") and group.size > 0:
            shorter = _within(axes, group.name, group.size // 2, at_least=1)
            longer = _within(axes, group.name, group.size * 2 + 3)
            if shorter < group.size:
                yield f"{group.name} shorter", {group.name: shorter}, 1
            if longer > group.size:
                yield f"{group.name} longer", {group.name: longer}, min(2, most)
        elif group.kind == "pixels" and group.name == "height":
            square = {g.name: g.size * 2 for g in layout.groups.values() if g.kind == "pixels"}
            if all(_within(axes, name, size) == size for name, size in square.items()):
                yield "image x2", square, 1


def _within(axes: Mapping[str, AxisRange], name: str, size: int, at_least: int = 0) -> int:
    """The size nearest to one that is wanted, of those that the export takes."""
    span = axes.get(name, AxisRange(min=0))
    size = max(size, span.min, at_least)
    return size if span.max is None else min(size, span.max)


def _copies(lead: list[Group], axes: Mapping[str, AxisRange]) -> int:
    """How often the sample may be in one batch; 1 where it has no batch."""
    room = [3] if lead else [1]
    for group in lead:
        high = axes[group.name].max if group.name in axes else None
        if high is not None:
            room.append(max(high // max(group.size, 1), 1))
    return min(room)


def _first_row(leaves: Mapping[str, torch.Tensor], layout: Layout) -> dict[str, torch.Tensor] | None:
    """The sample's first row alone; None where rows and leading axes don't divide evenly."""
    batch = layout.groups["batch"].size if "batch" in layout.groups else 0
    if batch < 2:
        return None
    single = {}
    for name, leaf in leaves.items():
        terms = layout.axes.get(name, {}).get(0)
        if terms is None or layout.groups[terms[0]].kind != "lead":
            single[name] = leaf
        elif leaf.shape[0] % batch:
            return None
        else:
            single[name] = leaf[: leaf.shape[0] // batch]
    return single


def _padded(mask: torch.Tensor, side: str) -> torch.Tensor:
    """The mask with a third of the last row hidden on one side."""
    mask, hidden = mask.clone(), max(mask.shape[1] // 3, 1)
    if side == "left":
        mask[-1, :hidden] = 0
    else:
        mask[-1, -hidden:] = 0
    return mask


def copied(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The kwargs with containers of their own: a cache that was updated in place is no input for the second call."""
    leaves, spec = structure.flatten(dict(kwargs))
    copied: dict[str, Any] = structure.unflatten(
        [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves], spec
    )
    return copied
