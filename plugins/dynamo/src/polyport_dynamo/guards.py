"""Guards of a trace that the model itself does not need.

Modeling code compares sizes (is the image of the configured size? is there one row only?), and a trace keeps one answer
together with a guard that refuses the other. Often both branches compute the same: an interpolation to the same size, a
padding of nothing. That is checked here by running the graph where a guard refuses it and comparing with the model; a guard
that proves needless is dropped. All others stay, so that a size the graph is not good for is refused and never wrong.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import Mod

from polyport import structure
from polyport.capture import rebuilt, tensor_leaves
from polyport.pipeline import CapturedCall
from polyport_dynamo.axes import user_tensors
from polyport_dynamo.runner import ProgramRunner

logger = logging.getLogger(__name__)

#: Largest relative difference that is rounding and no other branch, by dtype. A shifted window changes 1e-4 of an output.
_TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5}

#: Sizes at which an equation is tried.
_TRIALS = 12


def drop_needless_guards(program: torch.export.ExportedProgram, call: CapturedCall) -> None:
    """Drop guards of the program that refuse sizes at which it computes what the model computes.

    Args:
        program: The program; changed in place.
        call: The call it was traced from. Its model must be in evaluation mode.
    """
    shape_env = _shape_env(program)
    if shape_env is None or not call.axes:
        return
    _relax_asserts(program)
    for kwargs in _other_calls(call):
        if _refusing(program, kwargs) and agrees(program, call, kwargs):
            forget(program, kwargs)


def forget(program: torch.export.ExportedProgram, kwargs: Mapping[str, Any]) -> None:
    """Drop the guards that refuse a call: it was found to be computed right."""
    refused = _refusing(program, kwargs)
    for guard in refused:
        logger.debug("guard dropped, both branches compute the same: %s", guard.expr)
    if not refused:
        return
    shape_env = _shape_env(program)
    shape_env.guards[:] = [guard for guard in shape_env.guards if guard not in refused]
    convert: Any = torch.export.exported_program._convert_guards_to_code
    program._guards_code = convert(program.graph_module)


def refused_by(program: torch.export.ExportedProgram, call: CapturedCall) -> list[str]:
    """The guards, readable, that refuse the caller's own sample."""
    return [str(guard.expr) for guard in _refusing(program, call.sample)] if call.axes else []


def _refusing(program: torch.export.ExportedProgram, kwargs: Mapping[str, Any]) -> list[Any]:
    """The guards of the program that refuse a call of these sizes."""
    shape_env = _shape_env(program)
    if shape_env is None:
        return []
    sizes = _sizes(program, kwargs)
    return [guard for guard in shape_env.guards if _is_false(guard.expr, sizes)]


def frozen_by(
    program: torch.export.ExportedProgram, call: CapturedCall, symbols: Mapping[sympy.Symbol, str]
) -> list[Any]:
    """The guards that pin a function of open axes to a number, which leaves the graph a single size or a few."""
    shape_env = _shape_env(program)
    if shape_env is None or not call.axes:
        return []
    divisors = [part.args[1] for guard in shape_env.guards for part in guard.expr.atoms(Mod)]
    unit = math.lcm(*(int(divisor) for divisor in divisors if divisor.is_Integer and divisor > 0))
    return [guard.expr for guard in shape_env.guards if _pins(guard.expr, symbols, unit)]


def _pins(expression: Any, symbols: Mapping[sympy.Symbol, str], unit: int) -> bool:
    """Whether an equation with a number fails at nearly every multiple of `unit`, by which sizes may have to divide."""
    if not isinstance(expression, sympy.Eq) or not expression.free_symbols <= symbols.keys():
        return False
    left, right = expression.args
    value = left if right.is_Integer else right
    if not (left.is_Integer or right.is_Integer) or "Mod" in type(value).__name__:
        return False
    held = 0
    for step in range(1, _TRIALS + 1):
        # axes of one name have one size, whether or not the trace found that out
        names = enumerate(sorted(set(symbols.values())), start=2)
        sizes = {name: (step * 7 + place) * unit for place, name in names}
        held += not _is_false(expression, {symbol: sizes[name] for symbol, name in symbols.items()})
    return held < _TRIALS // 2


def at_sample_sizes(call: CapturedCall, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call with every axis but the leading ones at the caller's own size, where that is a size a trace keeps open."""
    sample = tensor_leaves(call.sample)
    leaves = {}
    for name, leaf in tensor_leaves(kwargs).items():
        value = leaf
        for dim in call.axes.get(name, {}):
            size = sample[name].shape[dim]
            if dim > 0 and 2 <= size < value.shape[dim]:
                value = value.narrow(dim, 0, size)
            elif dim > 0 and size > value.shape[dim]:
                value = value.index_select(dim, torch.arange(size, device=value.device) % value.shape[dim])
        leaves[name] = value.clone()
    return rebuilt(dict(kwargs), leaves)


def _relax_asserts(program: torch.export.ExportedProgram) -> None:
    """Drop run-time asserts that only repeat torch.export's assumption of at least two of everything.

    torch.export does not hold callers to it for the axes of inputs; for sizes that depend on values, such as the number of
    ones in a mask, it does, and refuses a batch of one.
    """
    for node in list(program.graph.nodes):
        if node.op != "call_function" or node.target is not torch.ops.aten._assert_scalar.default:
            continue
        condition = node.args[0]
        expression = (
            getattr(condition.meta.get("val"), "node", None) if isinstance(condition, torch.fx.Node) else None
        )
        expression = getattr(expression, "expr", None)
        target = getattr(condition, "target", None)
        two = target is not None and getattr(target, "__name__", "") == "ge" and condition.args[1] == 2
        if two or expression is True:
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _other_calls(call: CapturedCall) -> Iterator[dict[str, Any]]:
    """The sample at its own sizes, and its first row."""
    yield rebuilt(call.sample, {})
    leaves = tensor_leaves(call.sample)
    rows = {
        leaves[leaf].shape[dim]
        for leaf, dims in call.axes.items()
        for dim, name in dims.items()
        if name == "batch"
    }
    batch = next(iter(rows), 1)
    if batch < 2:
        return
    single = {}
    for leaf, dims in call.axes.items():
        value = leaves[leaf]
        for dim, name in dims.items():
            leading = name == "batch" or (dim == 0 and "sequence" not in name)
            if leading and value.shape[dim] % batch == 0:
                value = value.narrow(dim, 0, value.shape[dim] // batch)
        single[leaf] = value.clone()
    yield rebuilt(call.sample, single)


def agrees(program: torch.export.ExportedProgram, call: CapturedCall, kwargs: dict[str, Any]) -> bool:
    """Whether the graph, asked without guards, gives the model's results."""
    try:
        wanted = structure.flatten(call.model(**rebuilt(kwargs, {})))[0]
        found = ProgramRunner(program)(list(tensor_leaves(rebuilt(kwargs, {})).values()))
    except Exception as error:  # noqa: BLE001  whatever it is, the guard stays
        logger.debug("guards stay: %s: %s", type(error).__name__, error)
        return False
    wanted = [x for x in wanted if isinstance(x, torch.Tensor)]
    return len(wanted) == len(found) and all(_same(a, b) for a, b in zip(wanted, found, strict=True))


def _same(wanted: torch.Tensor, found: torch.Tensor) -> bool:
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return False
    if not wanted.is_floating_point():
        return torch.equal(wanted, found)
    both = wanted.isfinite() & found.isfinite()
    if not torch.equal(wanted.isfinite(), found.isfinite()) or not bool(both.any()):
        return not bool(both.any())
    error = (wanted - found)[both].abs().max() / wanted[both].abs().max().clamp(min=1e-6)
    return bool(error <= _TOLERANCE.get(wanted.dtype, 4e-3))


def _shape_env(program: torch.export.ExportedProgram) -> Any:
    for node in user_tensors(program):
        mode = getattr(node.meta["val"], "fake_mode", None)
        if mode is not None:
            return mode.shape_env
    return None


def _sizes(program: torch.export.ExportedProgram, kwargs: Mapping[str, Any]) -> dict[sympy.Symbol, int]:
    """Values of the program's symbols in a call."""
    inputs = tensor_leaves(kwargs)
    sizes: dict[sympy.Symbol, int] = {}
    for node, value in zip(user_tensors(program), inputs.values(), strict=True):
        for size, actual in zip(node.meta["val"].shape, value.shape, strict=True):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                sizes.setdefault(size.node.expr, int(actual))
    return sizes


def _is_false(expression: Any, sizes: Mapping[sympy.Symbol, int]) -> bool:
    if not hasattr(expression, "free_symbols") or not expression.free_symbols <= sizes.keys():
        return False
    try:
        value = expression.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()})
    except ZeroDivisionError:
        return True  # a part of nothing: not what was traced
    return bool(value == False)  # noqa: E712  sympy's false is no Python False
