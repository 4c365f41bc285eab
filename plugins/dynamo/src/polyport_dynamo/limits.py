"""Limits of an axis that are the trace's and not the model's.

A trace keeps one answer to every comparison of a size. When a cache keeps the last 8 tokens, a trace of 5 is good for up to 7, and
a trace of 12 for any number, since cutting 8 from the end of something shorter takes all of it. So an axis that came out with
an upper limit is tried beyond it: where the model goes on, the trace is made again beyond the limit.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import Any

import attrs
import sympy
import torch
from torch.utils._sympy.value_ranges import ValueRanges

from polyport.capture import rebuilt, tensor_leaves
from polyport.capture.configs import placeholders
from polyport.capture.groups import Layout
from polyport.capture.layout import propose
from polyport.capture.probe import Probe, is_prime
from polyport.capture.resize import resized
from polyport.metadata import AxisRange
from polyport.pipeline import CapturedCall
from polyport_dynamo.axes import AxisNames
from polyport_dynamo.guards import agrees, forget

logger = logging.getLogger(__name__)

#: Longest axis that is tried, since trying means running the model once: a limit above it is believed.
_LONGEST = 2048


def beyond_limits(
    call: CapturedCall, kwargs: Mapping[str, Any], ranges: Mapping[str, AxisRange]
) -> dict[str, Any] | None:
    """Inputs to trace with in place of `kwargs`, beyond limits that the model doesn't have.

    Args:
        call: The captured call. Its model must be in evaluation mode.
        kwargs: What was traced with.
        ranges: The limits that came out.

    Returns:
        The inputs, or None where every limit is the model's own.
    """
    probe = Probe(call.model, call.sample)
    layout = propose(probe.leaves, probe.special).only(set(call.ranges))
    sizes: dict[str, int] = {}
    one_row = {"batch": 1} if "batch" in layout.groups else {}  # a long input takes memory
    for name, span in ranges.items():
        group = layout.groups.get(name)
        if (
            span.max is None
            or span.max > _LONGEST
            or group is None
            or group.kind not in ("tokens", "past", "free")
            or _learned(call.model, span.max)
        ):
            continue
        just_beyond = resized(probe.leaves, layout, {**one_row, name: span.max + 1}, 1, probe.special)
        try:
            probe.run(just_beyond)
        except Exception as error:  # noqa: BLE001  the model says no in many ways
            logger.debug("the model shares the limit of %s: %s: %s", name, type(error).__name__, error)
        else:
            # well beyond: the number next to a limit is one that code compares with
            sizes[name] = next(n for n in itertools.count(2 * span.max + 1) if is_prime(n))
            logger.debug("the trace limits %s to %d, the model doesn't: now %d", name, span.max, sizes[name])
    if not sizes:
        return None
    traced = tensor_leaves(kwargs)
    layout = propose(traced, probe.special).only(set(call.ranges))
    return rebuilt(dict(kwargs), resized(traced, layout, sizes, 1, probe.special))


def _learned(model: torch.nn.Module, positions: int) -> bool:
    """Whether the model has learned that many positions and says so: then trying more is not worth the run."""
    declared = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    tables = (module for module in model.modules() if isinstance(module, torch.nn.Embedding))
    return declared == positions and any(table.num_embeddings == positions for table in tables)


def widen(program: torch.export.ExportedProgram, call: CapturedCall, names: AxisNames) -> AxisNames:
    """Lower limits that the graph doesn't need, taken off the program.

    Args:
        program: The program; changed in place.
        call: The call it was traced from. Its model must be in evaluation mode.
        names: Names and limits that came out.

    Returns:
        The names with the limits that are left.
    """
    leaves = tensor_leaves(call.sample)
    special = placeholders(getattr(call.model, "config", None))
    layout = propose(leaves, special).only(set(call.ranges))
    ranges = dict(names.ranges)
    for name, span in names.ranges.items():
        group, promised = layout.groups.get(name), call.ranges[name].min if name in call.ranges else span.min
        if group is None or group.kind == "lead" or span.min <= promised:
            continue
        for size in dict.fromkeys((promised, group.size)):
            if size >= span.min:
                continue
            shorter = rebuilt(call.sample, resized(leaves, layout, {name: size}, 1, special))
            if agrees(program, call, shorter) and _agrees_later(program, call, layout, {name: size}):
                ranges[name] = AxisRange(min=size, max=span.max)
                forget(program, shorter)
                _lower(program, [symbol for symbol, known in names.symbols.items() if known == name], size)
                break
    return attrs.evolve(names, ranges=ranges)


def _agrees_later(
    program: torch.export.ExportedProgram, call: CapturedCall, layout: Layout, sizes: dict[str, int]
) -> bool:
    """Whether the graph is right for few new tokens after more cached ones, too.

    Beyond a limit, a model may make its table of positions for as many tokens as are new (Speech2Text): that table is too
    short for what is cached.
    """
    past = layout.groups.get("past")
    if past is None or "past" in sizes:
        return True
    special = placeholders(getattr(call.model, "config", None))
    more = resized(tensor_leaves(call.sample), layout, {**sizes, "past": past.size + 3}, 1, special)
    return agrees(program, call, rebuilt(call.sample, more))


def _lower(program: torch.export.ExportedProgram, symbols: list[sympy.Symbol], size: int) -> None:
    """Let the program itself take that size: 2 stands for 1 in torch.export's ranges."""
    for symbol in symbols:
        span = program.range_constraints.get(symbol)
        if span is not None:
            program.range_constraints[symbol] = ValueRanges(max(size, 2), span.upper)
