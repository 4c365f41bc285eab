"""Passes over the edge program, for every device."""

from __future__ import annotations

from typing import Any

import torch
from executorch.exir.dialects._ops import ops
from executorch.exir.operator.convert import is_inplace_variant
from executorch.exir.pass_base import ExportPass
from executorch.exir.passes import MemoryPlanningPass
from torch.fx.passes.infra.pass_base import PassResult


class RowByRow(ExportPass):
    """No tensor is laid out with its channels last, and none is copied to be laid out otherwise.

    Torch's own decompositions (of bicubic interpolation, of a reshape) ask for copies where their input is a view with other strides.
    In an edge program each view is a copy, so that these change nothing; and tensors with their channels last are refused by most of
    ExecuTorch's kernels, while some compute something else without a word.
    """

    def call(self, graph_module: torch.fx.GraphModule) -> PassResult:
        """Change a graph, if there is something to change."""
        graph, turned = graph_module.graph, False
        for node in list(graph.nodes):
            turned |= _turned(node.kwargs)
            # what the program returns must have memory of its own
            if node.target is _CLONE and not any(user.op == "output" for user in node.users):
                node.replace_all_uses_with(node.args[0], propagate_meta=False)
                graph.erase_node(node)
        if turned:
            result: PassResult = super().call(graph_module)
            return result
        graph_module.recompile()
        return PassResult(graph_module, True)

    def call_operator(self, op: Any, args: Any, kwargs: Any, meta: Any) -> Any:
        """Write an operator once more."""
        if _turned(kwargs):
            kwargs = {**kwargs, "dim_order": sorted(kwargs["dim_order"])}
        return super().call_operator(op, args, kwargs, meta)


class PlanOnce(MemoryPlanningPass):
    """What is written in place has one place in memory.

    ExecuTorch's pass lets an operator that writes in place share the place of what it writes, but not the results of the graph, which stand
    for the new contents of buffers (https://github.com/pytorch/executorch/pull/19482): as much as all caches together was planned for
    results that a program doesn't return.
    """

    def run(self, graph_module: torch.fx.GraphModule, graph_signature: Any = None) -> PassResult:
        """Plan the memory of a graph."""
        for node in graph_module.graph.nodes:
            if (schema := getattr(node.target, "_schema", None)) and is_inplace_variant(
                schema.name, schema.overload_name
            ):
                node.meta["spec"] = node.args[0].meta["spec"]
        output = graph_module.graph.output_node()
        output.meta["spec"] = torch.fx.map_arg(output.args[0], lambda node: node.meta.get("spec"))
        result: PassResult = super().run(graph_module, graph_signature)
        return result


_CLONE = ops.edge.dim_order_ops._clone_dim_order.default


def _turned(kwargs: Any) -> bool:
    order = kwargs.get("dim_order")
    return order is not None and list(order) != sorted(order)
