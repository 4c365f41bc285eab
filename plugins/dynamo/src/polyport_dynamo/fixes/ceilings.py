"""`math.ceil` of a size, which an archive can't hold."""

from __future__ import annotations

import io
import math
import operator
from collections.abc import Callable

import torch

from polyport.patching import GraphFix


def _rewrite(program: torch.export.ExportedProgram) -> bool:
    """Write `ceil(a / b)` of whole numbers as `-((-a) // b)`."""
    graph = program.graph_module.graph
    found = [node for node in graph.nodes if node.target is math.ceil and _is_quotient(node.args[0])]
    for node in found:
        quotient = node.args[0]
        above, below = quotient.args
        with graph.inserting_before(node):
            value = above
            for target, rest in ((operator.neg, ()), (operator.floordiv, (below,)), (operator.neg, ())):
                made = graph.call_function(target, (value, *rest))
                made.meta["val"] = target(
                    *(x.meta["val"] if isinstance(x, torch.fx.Node) else x for x in made.args)
                )
                value = made
        node.replace_all_uses_with(value)
        graph.erase_node(node)
        if not quotient.users:
            graph.erase_node(quotient)
    if found:
        program.graph_module.recompile()
    return bool(found)


def _is_quotient(value: object) -> bool:
    if not isinstance(value, torch.fx.Node) or value.target is not operator.truediv:
        return False
    operands = [x.meta.get("val") if isinstance(x, torch.fx.Node) else x for x in value.args]
    return all(isinstance(x, (int, torch.SymInt)) for x in operands)


def _reproduce(apply: Callable[[torch.export.ExportedProgram], bool]) -> None:
    class Halves(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.new_zeros(math.ceil(x.shape[0] / 2))

    shapes = {"x": {0: torch.export.Dim.AUTO}}
    program = torch.export.export(Halves(), (torch.ones(5),), dynamic_shapes=shapes)
    apply(program)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    if [len(loaded(torch.ones(n))) for n in (4, 7)] != [2, 4]:
        raise AssertionError("the size is rounded wrongly")


FIX = GraphFix(
    id="torch-ceil-of-a-size",
    apply=_rewrite,
    reason=(
        "Sizes rounded up with math.ceil (MobileViT's patches) are traced, but torch.export.save has no name for that function "
        "and fails with 'not in _SYM_OPS'. For whole numbers, negating a floor division twice is the same."
    ),
    upstream="unreported",
    affects={"torch": ">=2.12,<2.15"},
    reproduce=_reproduce,
)
