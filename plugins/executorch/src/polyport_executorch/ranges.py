"""What the tracer knows of the sizes of axes while a program is lowered.

ExecuTorch plans memory by the ranges of the tracer's symbols, and a traced program is shared with formats that need no limits.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import is_symbolic
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from polyport.metadata import ExportMetadata
from polyport_dynamo.lowering.facts import dims, symbolic
from polyport_executorch.bounds import total

Node = torch.fx.Node

#: So many combinations of sizes are tried to find the largest of what is computed of them.
_TRIALS = 100_000


def limits(metadata: ExportMetadata, inputs: Mapping[str, Any]) -> dict[Any, int]:
    """Symbol of the traced program -> its largest value.

    Args:
        metadata: A record in which all axes are bounded.
        inputs: Leaf -> the tensor that was traced with, with symbols of the tracer as sizes.
    """
    found: dict[Any, int] = {}
    for name, size in _sizes(metadata, inputs):
        if (limit := total(metadata, name)) is not None:
            for symbol, most in (*_solved(symbolic(size), limit), *_solved(_recorded(size), limit)):
                found[symbol] = min(found.get(symbol, most), most)
    return found


def _sizes(metadata: ExportMetadata, inputs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name -> size of each axis of the inputs that varies."""
    for info in metadata.inputs:
        for size, name in zip(inputs[info.name].shape, info.shape, strict=True):
            if isinstance(name, str):
                yield name, size


def _recorded(size: Any) -> Any:
    """A size as it was before the tracer found it equal to another: values in the graph may still have that symbol."""
    return size.node._expr if isinstance(size, torch.SymInt) else size


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


def settle(metadata: ExportMetadata, inputs: Mapping[str, Any], nodes: Iterable[Node]) -> None:
    """Let placeholders have the sizes of a lowering, of which ExecuTorch works out all others. To be called within `narrowed`.

    Those that can't vary, as that of the batch where only one row is allowed, are numbers: these cost less than symbols. Others stand for a
    size within the limits, and no longer for the one that was traced with: torch decides by that what it can't decide by the ranges.

    Args:
        metadata: A record in which all axes are bounded.
        inputs: Leaf -> the tensor that was traced with, with symbols of the tracer as sizes.
        nodes: Placeholders; changed.
    """
    only: dict[Any, Any] = {}
    for name, size in _sizes(metadata, inputs):
        span, symbol = metadata.axes.get(name), symbolic(size)
        if span is not None and span.min == span.max and getattr(symbol, "is_Symbol", False):
            only[symbol] = sympy.Integer(span.min)
    env = _tracer(inputs)
    for node in nodes:
        value = node.meta.get("val")
        if env is not None and isinstance(value, FakeTensor) and any(map(is_symbolic, value.shape)):
            with value.fake_mode:
                sizes = [
                    env.create_symintnode(sympy.sympify(size).xreplace(only), hint=None)
                    for size in dims(node)
                ]
                node.meta["val"] = torch.empty(sizes, dtype=value.dtype)


def largest_size(size: Any) -> Any:
    """The largest value of a size, given the ranges of its symbols.

    Torch finds none where something is divided by what might be 0 for all it knows. ExecuTorch then plans for the size that was traced with.

    Args:
        size: An int or a size of the tracer.

    Returns:
        The largest value; the size as it is, where it depends on values or would take too many trials.
    """
    if not isinstance(size, torch.SymInt):
        return size
    expression, known = size.node.expr, size.node.shape_env.var_to_range
    bound = bound_sympy(expression, known).upper
    if bound.is_Integer:
        return int(bound)
    symbols = sorted(expression.free_symbols, key=str)
    spans = [known.get(symbol, ValueRanges.unknown_int()) for symbol in symbols]
    if not all(span.upper.is_Integer for span in spans):
        return size
    values = [range(int(span.lower), int(span.upper) + 1) for span in spans]
    if math.prod(map(len, values)) > _TRIALS:
        return size
    return _most(expression, tuple(symbols), tuple(values))


@functools.lru_cache(maxsize=1024)
def _most(expression: Any, symbols: tuple[Any, ...], values: tuple[range, ...]) -> int:
    """The largest value of an expression: all are tried. What it is not defined for doesn't count."""
    found = 0
    for combination in itertools.product(*values):
        with contextlib.suppress(ZeroDivisionError):
            given = dict(zip(symbols, combination, strict=True))
            found = max(found, int(sympy_interp(PythonReferenceAnalysis, given, expression)))
    return found


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
    for name, size in _sizes(metadata, inputs):
        if isinstance(size, torch.SymInt):
            other = first.setdefault(name, size)
            if other != size:
                continue
            # what the tracer knew to be equal, it may still call by two names
            one, same = symbolic(size), symbolic(other)
            if one != same and getattr(one, "is_Symbol", False):
                size.node.shape_env._set_replacement(one, same, f"axes {name}")
