"""What a trace did to the axes that were promised to vary."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import sympy
import torch

from polyport.capture import open_axes, tensor_leaves
from polyport.capture.configs import placeholders as placeholder_ids
from polyport.capture.layout import propose
from polyport.errors import ExportError
from polyport.metadata import AxisRange
from polyport.pipeline import CapturedCall

STAGE = "trace"


@attrs.frozen
class AxisNames:
    """Names for the symbols of a program.

    Args:
        symbols: Symbol -> name of the axis.
        ranges: Name -> the sizes it may take.
    """

    symbols: Mapping[sympy.Symbol, str]
    ranges: Mapping[str, AxisRange]

    def size(self, value: Any) -> int | str:
        """A size as an integer, the name of an axis, or an expression in names."""
        if isinstance(value, int):
            return value
        expression = value.node.expr
        if expression.is_Integer:
            return int(expression)
        if not expression.free_symbols <= self.symbols.keys():
            return "?"
        if expression in self.symbols:
            return self.symbols[expression]
        renamed = {
            symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, name in self.symbols.items()
        }
        return str(expression.xreplace(renamed)).replace(" ", "")


def user_tensors(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    """The placeholders of the program that take tensors from the caller, in order."""
    wanted = [name for name in program.graph_signature.user_inputs if isinstance(name, str)]
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return [nodes[name] for name in wanted if isinstance(nodes[name].meta.get("val"), torch.Tensor)]


def check_axes(program: torch.export.ExportedProgram, call: CapturedCall) -> AxisNames:
    """Name the program's symbols, and make sure that every axis that was promised to vary does.

    Raises:
        ExportError: The trace fixed an axis, tied it to another one, or allows only some sizes of it.
    """
    leaves = list(tensor_leaves(call.kwargs))
    placeholders = dict(zip(leaves, user_tensors(program), strict=True))
    symbols: dict[sympy.Symbol, str] = {}
    for leaf, dim, name in _sorted(call.axes):
        expression = _expression(placeholders[leaf].meta["val"].shape[dim])
        if expression.is_Symbol:
            symbols.setdefault(expression, name)
        elif expression.is_Integer:
            raise ExportError(
                f"Axis {dim} of {leaf!r} ({name}) varies when the model runs, but the trace fixed it to {expression}. "
                f"{_culprit(program, placeholders[leaf], dim)}",
                stage=STAGE,
            )
    for leaf, dim, name in _sorted(call.axes):
        size = placeholders[leaf].meta["val"].shape[dim]
        tied = {symbols.get(symbol, str(symbol)) for symbol in size.node.expr.free_symbols}
        if not size.node.expr.is_Symbol and not tied <= set(name.split("+")):
            raise ExportError(
                f"Axis {dim} of {leaf!r} ({name}) varies when the model runs, but the trace tied it to others as "
                f"{size.node.expr.xreplace({s: sympy.Symbol(n) for s, n in symbols.items()})}.",
                stage=STAGE,
            )
    if not call.axes:
        _user_symbols(program, placeholders, call, symbols)
    return AxisNames(symbols, _ranges(program, symbols, call))


def _expression(size: int | torch.SymInt) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _sorted(axes: Mapping[str, Mapping[int, str]]) -> Iterator[tuple[str, int, str]]:
    """Plain axes before sums of others, so that the plain ones give their symbols a name."""
    flat = [(leaf, dim, name) for leaf, dims in axes.items() for dim, name in dims.items()]
    return iter(sorted(flat, key=lambda item: "+" in item[2]))


def _user_symbols(
    program: torch.export.ExportedProgram,
    placeholders: Mapping[str, torch.fx.Node],
    call: CapturedCall,
    symbols: dict[sympy.Symbol, str],
) -> None:
    """Names for the axes of the user's own `dynamic_shapes`: their `Dim`'s, else the usual ones.

    Raises:
        ExportError: The trace fixed an axis that the user wants open.
    """
    proposed = propose(tensor_leaves(call.kwargs), placeholder_ids(call.model.config)).axes
    for leaf, dims in open_axes(call.dynamic_shapes or {}, call.kwargs).items():
        for dim, mark in dims.items():
            size = _expression(placeholders[leaf].meta["val"].shape[dim])
            if size.is_Integer:
                small = "The sample is too small there: give one that is at least 2 long." if size < 2 else ""
                raise ExportError(
                    f"dynamic_shapes wants axis {dim} of {leaf!r} open, but the trace fixed it to {size}. "
                    f"{small or _culprit(program, placeholders[leaf], dim)}",
                    stage=STAGE,
                )
            if size.is_Symbol:
                usual = "+".join(proposed.get(leaf, {}).get(dim, ())) or f"{leaf}_{dim}".replace(".", "_")
                name = getattr(mark, "__name__", None) or usual
                symbols.setdefault(size, name)


def _ranges(
    program: torch.export.ExportedProgram, symbols: Mapping[sympy.Symbol, str], call: CapturedCall
) -> dict[str, AxisRange]:
    ranges: dict[str, AxisRange] = {}
    marks = [m for dims in open_axes(call.dynamic_shapes or {}, call.kwargs).values() for m in dims.values()]
    wanted = {mark.__name__: mark for mark in marks if hasattr(mark, "__name__") and hasattr(mark, "min")}
    for symbol, name in symbols.items():
        if "+" in name:
            continue  # a mask over a cache: the ranges of its parts say it
        least = call.ranges[name].min if name in call.ranges else getattr(wanted.get(name), "min", 1)
        found = program.range_constraints.get(symbol)
        low, high = least, None
        if found is not None:
            # torch.export assumes at least 2 of every open axis, and does not hold callers to it
            low = least if found.lower <= 2 else int(found.lower)
            high = int(found.upper) if found.upper.is_Integer and found.upper < 2**31 else None
        if name in ranges:  # the mask's sequence is the tokens' sequence: the tighter limit holds for both
            known = ranges[name]
            low = max(low, known.min)
            high = min((x for x in (high, known.max) if x is not None), default=None)
        ranges[name] = AxisRange(min=low, max=high)
    return ranges


def _culprit(program: torch.export.ExportedProgram, node: torch.fx.Node, dim: int) -> str:
    """What is known about why an axis was fixed: the guards that mention it."""
    source = re.compile(re.escape(f"'{node.name}']") + rf".*size\(\)\[{dim}\]")
    guards = [guard for guard in getattr(program, "_guards_code", []) if source.search(guard)]
    return (
        f"Its code compares sizes: {'; '.join(guards[:3])}."
        if guards
        else "Its code compares the size with a number."
    )
