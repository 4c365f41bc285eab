"""The largest sizes that axes may have, which ExecuTorch plans memory for.

What the model itself limits stays its limit, and what it leaves open gets one: the memory of a plan grows with each of them, often with
the square. `ExecutorchConfig.max_sizes` sets them; the record has them, so that a longer input gets an error that names its axis.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import sympy
import torch
from torch.utils._sympy.value_ranges import ValueRanges

from polyport.errors import ConfigError
from polyport.metadata import AxisRange, ExportMetadata
from polyport_dynamo.lowering.facts import symbolic

#: Rows, where nothing says more.
_BATCH = 8
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


def bounded(metadata: ExportMetadata, sizes: Mapping[str, int], wanted: Mapping[str, int]) -> ExportMetadata:
    """A record whose axes all have a largest size.

    Args:
        metadata: The record of a traced model.
        sizes: Name of an axis -> its size in the sample.
        wanted: `ExecutorchConfig.max_sizes`. Where axes vary, a name that other components of a generation may have as an axis is
            left to them.

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
        name: AxisRange(min=span.min, max=wanted.get(name) or _largest(name, metadata, sizes.get(name, 1)))
        for name, span in metadata.axes.items()
    }
    return attrs.evolve(metadata, axes=axes)


def _largest(name: str, metadata: ExportMetadata, size: int) -> int:
    """The largest size by default: never below the sample's, which the model takes."""
    span = metadata.axes[name]
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


def limits(metadata: ExportMetadata, inputs: Mapping[str, Any]) -> dict[Any, int]:
    """Symbol of the traced program -> its largest value.

    Args:
        metadata: A record in which all axes are bounded.
        inputs: Leaf -> the tensor that was traced with, with symbols of the tracer as sizes.
    """
    found: dict[Any, int] = {}
    for info in metadata.inputs:
        for size, name in zip(inputs[info.name].shape, info.shape, strict=True):
            if isinstance(name, str) and (limit := total(metadata, name)) is not None:
                for symbol, most in (*_solved(symbolic(size), limit), *_solved(_recorded(size), limit)):
                    found[symbol] = min(found.get(symbol, most), most)
    return found


def _recorded(size: Any) -> Any:
    """A size as it was before the tracer found it equal to another: values in the graph may still have that symbol."""
    return size.node._expr if isinstance(size, torch.SymInt) else size


def total(metadata: ExportMetadata, name: str) -> int | None:
    """The limit of an axis that several may add up to, some of them of a fixed size (`past+1`); None where one has none."""
    parts = [
        int(part) if part.isdigit() else metadata.axes[part].max if part in metadata.axes else None
        for part in name.split("+")
    ]
    return None if None in parts else sum(part for part in parts if part is not None)


def _solved(size: Any, limit: int) -> Iterator[tuple[Any, int]]:
    """The symbol of a size such as `8*s + 1`, with the largest value for which the size is not above a limit."""
    symbols = sorted(getattr(size, "free_symbols", ()), key=str)
    if len(symbols) == 1 and size.is_polynomial(symbols[0]) and size.as_poly(symbols[0]).degree() == 1:
        slope, rest = (int(number) for number in size.as_poly(symbols[0]).all_coeffs())
        if slope > 0:
            yield symbols[0], (limit - rest) // slope


@contextlib.contextmanager
def narrowed(metadata: ExportMetadata, inputs: Mapping[str, Any]) -> Iterator[dict[Any, int]]:
    """What the tracer knows of sizes with all limits, until the context ends: other formats lower the program without.

    Args:
        metadata: A record in which all axes are bounded.
        inputs: Leaf -> the tensor that was traced with, with symbols of the tracer as sizes.

    Yields:
        Symbol -> its largest value.
    """
    largest = limits(metadata, inputs)
    env = _tracer(inputs)
    if env is None:
        yield largest
        return
    ranges, replacements, frozen = dict(env.var_to_range), dict(env.replacements), env.frozen
    traced = dict(env.backed_var_to_val)
    try:
        env.frozen = False
        _unite(metadata, inputs)  # first: the sizes that were traced with may be above the limits
        for symbol, limit in largest.items():
            span = ranges.get(symbol)
            if span is not None:
                # the tracer takes sizes to be 2 or more, and one that can only be 2 to be fixed
                env.var_to_range[symbol] = ValueRanges(min(span.lower, 2), max(limit, 3))
        _remember_smaller(env.backed_var_to_val, largest)
        yield largest
    finally:
        env.frozen = frozen
        for kept, before in (
            (env.var_to_range, ranges),
            (env.replacements, replacements),
            (env.backed_var_to_val, traced),
        ):
            kept.clear()
            kept.update(before)
        env._update_version_counter()


def exactly(inputs: Mapping[str, Any], largest: Mapping[Any, int]) -> None:
    """Let the tracer know limits as they are, once no more is traced: by these memory is planned. To be called within `narrowed`.

    Args:
        inputs: Leaf -> the tensor that was traced with, with symbols of the tracer as sizes.
        largest: Symbol -> its largest value.
    """
    env = _tracer(inputs)
    if env is None:
        return
    for symbol, limit in largest.items():
        if symbol in env.var_to_range:
            env.var_to_range[symbol] = ValueRanges(1, limit)
    env._update_version_counter()


def _tracer(inputs: Mapping[str, Any]) -> Any:
    """What knows of the sizes that vary; None where none does."""
    sizes = (size for value in inputs.values() for size in value.shape)
    return next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)


def _remember_smaller(traced: dict[Any, Any], largest: Mapping[Any, int]) -> None:
    """Let the tracer remember sizes within the limits, where it has traced with others: it decides by them.

    Different primes, as when it traced: what is true of one size by chance is not true of all.

    Args:
        traced: Symbol -> the size that was traced with; changed.
        largest: Symbol -> its largest value.
    """
    above = [symbol for symbol, limit in largest.items() if symbol in traced and traced[symbol] > limit]
    taken = {int(size) for symbol, size in traced.items() if symbol not in above}
    for symbol in above:
        size = sympy.prevprime(max(largest[symbol], 2) + 1)
        while size in taken and size > 2:
            size = sympy.prevprime(size)
        taken.add(size)
        traced[symbol] = sympy.Integer(size)


def _unite(metadata: ExportMetadata, inputs: Mapping[str, Any]) -> None:
    """Let the tracer know that axes of one name have one size, where it saw no need for that.

    A lowering that finds out by itself fails where the size that was traced with is above the limit.
    """
    first: dict[str, Any] = {}
    for info in metadata.inputs:
        for size, name in zip(inputs[info.name].shape, info.shape, strict=True):
            if isinstance(name, str) and isinstance(size, torch.SymInt):
                other = first.setdefault(name, size)
                if other != size:
                    continue
                # what the tracer knew to be equal, it may still call by two names
                one, same = symbolic(size), symbolic(other)
                if one != same and getattr(one, "is_Symbol", False):
                    size.node.shape_env._set_replacement(one, same, f"axes {name}")
