"""The largest sizes that axes may have, which ExecuTorch plans memory for.

What the model itself limits stays its limit, and what it leaves open gets one: the memory of a plan grows with each of them, often with
the square. `ExecutorchConfig.max_sizes` sets them; the record has them, so that a longer input gets an error that names its axis.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

import attrs
import torch
from torch.utils._pytree import tree_leaves

from polyport.errors import ConfigError
from polyport.metadata import AxisRange, ExportMetadata

#: Rows, where nothing says more. Delegates take memory for the largest sizes from the first call on, however small that is.
_BATCH = 4
#: Tokens, pixels and other sizes, where neither the sample nor the model says more.
_LEAST = 64
#: Tokens, where the model takes more.
_TOKENS = 512
#: Tokens whose logits a step returns: each is as long as the vocabulary, and generation reads the last.
_LOGITS = 16
#: Axes that some components of a generation have and others don't: one config is for all of them.
_OF_COMPONENTS = frozenset(
    (
        *(
            "batch",
            "sequence",
            "decoder_sequence",
            "encoder_sequence",
            "past",
            "cache_length",
            "total_sequence",
        ),
        *("images", "patches", "tiles", "frames", "height", "width", "time"),
    )
)


def bounded(
    metadata: ExportMetadata,
    sizes: Mapping[str, int],
    wanted: Mapping[str, int],
    chosen: Collection[int] = (),
) -> ExportMetadata:
    """A record whose axes all have a largest size.

    Args:
        metadata: The record of a traced model.
        sizes: Name of an axis -> its size in the sample.
        wanted: `ExecutorchConfig.max_sizes`. Where axes vary, a name that other components of a generation may have as an axis is
            left to them.
        chosen: Limits that the user has given the tracer (see `chosen_limits`): where an axis has one of them, it stays.

    Raises:
        ConfigError: A name in `wanted` is no axis, or its size is outside of what the trace allows.
    """
    for name, size in wanted.items():
        span = metadata.axes.get(name)
        if span is None and metadata.axes and name in _OF_COMPONENTS:
            continue
        if span is None:
            near = difflib.get_close_matches(name, metadata.axes, 1)
            raise ConfigError(
                f"max_sizes names {name!r}, which is no axis of this graph. Axes: {', '.join(sorted(metadata.axes)) or 'none'}."
                + (f" Did you mean {near[0]!r}?" if near else ""),
                backend="executorch",
            )
        if size < span.min or (span.max is not None and size > span.max):
            limits = f"at least {span.min}" if span.max is None else f"between {span.min} and {span.max}"
            raise ConfigError(
                f"max_sizes asks for {name}={size}; the traced model allows {limits}.", backend="executorch"
            )
    axes = {
        name: AxisRange(
            min=span.min,
            max=wanted.get(name) or _largest(name, metadata, sizes.get(name, 1), chosen),
        )
        for name, span in metadata.axes.items()
    }
    return attrs.evolve(metadata, axes=axes)


def chosen_limits(dynamic_shapes: Any) -> frozenset[int]:
    """The largest sizes that `dynamic_shapes` names.

    Args:
        dynamic_shapes: What `torch.export.export` takes under that name.
    """
    dims = (leaf for leaf in tree_leaves(dynamic_shapes) if hasattr(leaf, "max"))
    return frozenset(dim.max for dim in dims if isinstance(dim.max, int))


def _largest(name: str, metadata: ExportMetadata, size: int, chosen: Collection[int]) -> int:
    """The largest size by default: never below the sample's, which the model takes."""
    span = metadata.axes[name]
    if span.max is not None and span.max in chosen:
        return span.max
    if name == "batch" and not {"past", "kept"}.isdisjoint(metadata.axes):
        return max(
            span.min, size
        )  # every row of a step on a cache needs memory for as many tokens as there may be
    usual = {"batch": _BATCH, "sequence": _TOKENS, "past": _TOKENS, "kept": _LOGITS}.get(name, _LEAST)
    most = usual if name == "kept" else max(usual, 2 * size)
    return max(span.min, size, most if span.max is None else min(most, span.max))


def sizes_of(metadata: ExportMetadata, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Name of an axis -> its size in the tensors of a call.

    Args:
        metadata: The record.
        tensors: Leaf -> tensor.
    """
    found: dict[str, int] = {}
    for info in metadata.inputs:
        tensor = tensors.get(info.name)
        for axis, name in enumerate(info.shape):
            if tensor is not None and isinstance(name, str) and name in metadata.axes:
                found[name] = max(found.get(name, 0), tensor.shape[axis])
    return found


def total(metadata: ExportMetadata, name: str) -> int | None:
    """The limit of an axis that several may add up to, some of them of a fixed size (`past+1`); None where one has none."""
    parts = [
        int(part) if part.isdigit() else metadata.axes[part].max if part in metadata.axes else None
        for part in name.split("+")
    ]
    return None if None in parts else sum(part for part in parts if part is not None)
