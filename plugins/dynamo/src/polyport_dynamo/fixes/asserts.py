"""Run-time checks of data-dependent sizes that make an archive unreadable."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._sympy.symbol import SymT, symbol_is_type

from polyport.patching import GraphFix

_ASSERTS = (
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
    torch.ops.aten.sym_constrain_range.default,
)


def _drop(program: torch.export.ExportedProgram) -> bool:
    """Remove checks on sizes that depend on data, and what only they used."""
    graph = program.graph_module.graph
    dropped = [node for node in graph.nodes if node.target in _ASSERTS and _data_dependent(node.args[0])]
    for node in dropped:
        graph.erase_node(node)
    if dropped:
        graph.eliminate_dead_code()
        program.graph_module.recompile()
        left = {symbol for node in graph.nodes for symbol in _data_dependent(node)}
        for symbol in [
            x for x in program.range_constraints if symbol_is_type(x, SymT.UNBACKED_INT) and x not in left
        ]:
            del program.range_constraints[
                symbol
            ]  # loading would speak of a symbol that the graph doesn't have
    return bool(dropped)


def _data_dependent(value: Any) -> set[sympy.Symbol]:
    """The data-dependent sizes in what a node gives."""
    found = value.meta.get("val") if isinstance(value, torch.fx.Node) else None
    flat = pytree.tree_leaves(found)
    return set().union(
        *(
            free_unbacked_symbols(x)
            for x in flat
            if isinstance(x, (torch.Tensor, torch.SymInt, torch.SymBool))
        )
    )


def _reproduce(apply: Callable[[torch.export.ExportedProgram], bool]) -> None:
    class OneKind(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._check(torch.unique_consecutive(x.sum(1)).shape[0] == 1)  # type: ignore[no-untyped-call]
            return x * 2

    shapes = {"x": {0: torch.export.Dim.AUTO}}
    program = torch.export.export(OneKind(), (torch.ones(3, 4, dtype=torch.long),), dynamic_shapes=shapes)
    apply(program)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    torch.export.load(buffer)


FIX = GraphFix(
    id="torch-asserts-on-data-dependent-sizes",
    apply=_drop,
    reason=(
        "A model that checks its inputs by a data-dependent size (BART wants the same number of end tokens in every row) is "
        "traced with a run-time check that pins the size to a number; torch.export.load then fails with 'expected no "
        "unbacked symbols'. The check guards against inputs that the model refuses; the values don't depend on it."
    ),
    upstream="unreported",
    affects={"torch": ">=2.12,<2.15"},
    reproduce=_reproduce,
)
