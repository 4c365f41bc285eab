"""Passes over the edge program, for every device."""

from __future__ import annotations

from typing import Any

import torch
from executorch.exir.dialects._ops import ops
from executorch.exir.operator.convert import is_inplace_variant
from executorch.exir.pass_base import ExportPass
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.passes.sym_shape_eval_pass import ConstraintBasedSymShapeEvalPass
from executorch.exir.tensor import TensorSpec
from torch.export.graph_signature import OutputKind
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils._pytree import tree_leaves

from polyport_executorch.ranges import largest_size


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


class LargestSizes(ConstraintBasedSymShapeEvalPass):
    """Memory is planned for the largest sizes, also where they take more than a look at the ranges (see `ranges.largest_size`)."""

    def call(self, graph_module: torch.fx.GraphModule) -> PassResult:
        """Replace the sizes that vary in what memory is planned for."""
        for node in graph_module.graph.nodes:
            for spec in tree_leaves(node.meta.get("spec", [])):
                if isinstance(spec, TensorSpec):
                    spec.shape = [largest_size(size) for size in spec.shape]
                    spec.stride = [largest_size(size) for size in spec.stride]
        result: PassResult = super().call(graph_module)
        return result


def write_in_place(program: torch.export.ExportedProgram) -> None:
    """Let what becomes of a buffer be written to the buffer itself.

    ExecuTorch's own pass does so with every such operator whose operand no later one reads, and does not see who reads a view of it. What
    reads a buffer that is kept copies what it reads.

    Args:
        program: An edge program; changed.
    """
    graph, signature = program.graph, program.graph_signature
    order = {node: place for place, node in enumerate(graph.nodes)}
    results: Any = graph.output_node().args[0]
    for spec, node in zip(signature.output_specs, results, strict=True):
        if spec.kind != OutputKind.BUFFER_MUTATION or node.target is not ops.edge.aten.index_put.default:
            continue
        buffer: Any = node.args[0]
        if signature.inputs_to_buffers.get(buffer.name) == spec.target and all(
            order[user] <= order[node] for user in buffer.users
        ):
            node.target = ops.edge.aten.index_put_.default


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
