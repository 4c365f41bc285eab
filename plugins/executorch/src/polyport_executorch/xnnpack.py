"""What XNNPACK computes besides what ExecuTorch's partitioner gives it."""

from __future__ import annotations

from typing import Any

import torch
from executorch.backends.xnnpack.operators.node_visitor import NodeVisitor, register_node_visitor
from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS
from executorch.backends.xnnpack.partition.config.generic_node_configs import (
    CloneConfig,
    CloneDimOrderConfig,
    GeluConfig,
    GenericNodePartitionerConfig,
    MaxPool2dConfig,
    UnsqueezeCopyConfig,
)
from executorch.backends.xnnpack.partition.config.node_configs import MaxDimConfig
from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.serialization.xnnpack_graph_schema import XNNBatchMatrixMultiply, XNode
from executorch.backends.xnnpack.utils.utils import get_input_node
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, PartitionResult
from torch.fx.passes.infra.partitioner import Partition

from polyport_dynamo.lowering.facts import dims
from polyport_executorch.partitions import phases


class MatmulConfig(GenericNodePartitionerConfig):
    """Products of matrices with any number of axes before them, which stay as they are."""

    target_name = "matmul.default"

    def check_constraints(self, node: torch.fx.Node, ep: Any) -> bool:
        """Whether XNNPACK computes a node."""
        ranks = [get_input_node(node, index).meta["val"].dim() for index in (0, 1)]
        return bool(self.check_common_constraints(node, ep)) and min(ranks) >= 3 and ranks[0] == ranks[1]

    def supported_precision_types(self) -> list[ConfigPrecisionType]:
        """float32."""
        return [ConfigPrecisionType.FP32]

    def get_original_aten(self) -> Any:
        """The operator that is not decomposed."""
        return torch.ops.aten.matmul.default


class MatmulVisitor(NodeVisitor):
    """Writes them as XNNPACK's batch matrix multiplication."""

    target = "aten.matmul.default"

    def define_node(self, node: torch.fx.Node, xnn_graph: Any, vals_to_ids: Any, debug_handle: int) -> None:
        """Add a node to XNNPACK's graph."""
        self.define_nodes_tensor_inputs_outputs(node, xnn_graph, vals_to_ids)
        left, right = (vals_to_ids[get_input_node(node, index)] for index in (0, 1))
        product = XNNBatchMatrixMultiply(
            input1_id=left, input2_id=right, output_id=vals_to_ids[node], flags=0
        )
        xnn_graph.xnodes.append(XNode(xnode_union=product, debug_handle=debug_handle))


register_node_visitor(MatmulVisitor)  # returns nothing, so it is no decorator


class UnsqueezeConfig(UnsqueezeCopyConfig):
    """A new last axis, which is a reshape to XNNPACK: it takes one size that varies, and ExecuTorch's own config gives it more."""

    def check_constraints(self, node: torch.fx.Node, ep: Any) -> bool:
        """Whether XNNPACK computes a node."""
        varying = [size for size in node.meta["val"].shape if not isinstance(size, int)]
        return len(varying) <= 1 and bool(super().check_constraints(node, ep))


class ExactGeluConfig(GeluConfig):
    """GELU by the error function: XNNPACK has no other, and ExecuTorch's own config gives it that by tanh as well."""

    def check_constraints(self, node: torch.fx.Node, ep: Any) -> bool:
        """Whether XNNPACK computes a node."""
        exact = node.kwargs.get("approximate", "none") == "none"
        return exact and bool(super().check_constraints(node, ep))


class MaxPoolConfig(MaxPool2dConfig):
    """Largest of neighbours. ExecuTorch's own config reads a stride where none may be given."""

    def check_constraints(self, node: torch.fx.Node, ep: Any) -> bool:
        """Whether XNNPACK computes a node."""
        return len(node.args) > 2 and bool(super().check_constraints(node, ep))


#: Ours in the place of ExecuTorch's. It takes `max.dim` in forms that its own visitor then refuses.
#: Copies it removes again inside of the delegate, which then has one result twice.
_REPLACED = {
    UnsqueezeCopyConfig: UnsqueezeConfig,
    GeluConfig: ExactGeluConfig,
    MaxPool2dConfig: MaxPoolConfig,
    MaxDimConfig: None,
    CloneConfig: None,
    CloneDimOrderConfig: None,
}


class PhasePartitioner(XnnpackPartitioner):
    """Puts what can be computed at once into one delegate (see `polyport_executorch.partitions`)."""

    def ops_to_not_decompose(self, ep: Any) -> tuple[list[Any], Any]:
        """Operators that stay as they are, and which calls of them; None for all calls, which saves ExecuTorch one decomposition."""
        operators, kept = super().ops_to_not_decompose(ep)
        called = [node for node in ep.graph.nodes if node.op == "call_function" and node.target in operators]
        if kept is not None and all(map(kept, called)):
            present = {node.target for node in called}
            return [operator for operator in operators if operator in present], None
        return operators, kept

    def generate_partitions(self, ep: Any) -> list[Partition]:
        """The partitions of a program."""
        groups = self.get_matched_nodes_from_configs(ep)
        weights = {node: group for group in groups for node in group if node.op == "placeholder"}
        computed = [[node for node in group if node not in weights] for group in groups]
        taken = [group for group in computed if group and all(map(_has_room, group))]
        found = phases(ep.graph_module.graph, taken, _computes, _shares_memory)
        # a weight that others take as well is copied by ExecuTorch
        for nodes in found:
            nodes += [weight for weight, group in weights.items() if not set(nodes).isdisjoint(group)]
        return [Partition(id=index, nodes=nodes) for index, nodes in enumerate(found)]

    def partition(self, exported_program: Any) -> PartitionResult:
        """Tag the nodes of each partition."""
        # named for another purpose: with it, ExecuTorch's backend runs the pass that finds linear layers, and none besides
        backend = self.delegation_spec.backend_id
        plain = DelegationSpec(backend, [CompileSpec("dqlinear_partitioner", b"")])
        tags = {}
        for part in self.generate_partitions(exported_program):
            needs_none = all(map(_is_plain, part.nodes))
            tags[tag := f"tag{part.id}"] = plain if needs_none else self.delegation_spec
            for node in part.nodes:
                node.meta["delegation_tag"] = tag
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)


#: What none of the other passes of ExecuTorch's backend is about: they look for convolutions, pooling, norms with statistics, activations
#: behind those, copies and quantization. Each traces the graph anew, which is most of the time that a delegate takes.
_PLAIN = frozenset(
    f"aten.{name}"
    for name in (
        "abs.default", "add.Tensor", "_softmax.default", "bmm.default", "cos.default", "div.Tensor", "exp.default",
        "gelu.default", "linear.default", "log.default", "matmul.default", "maximum.default", "minimum.default",
        "mul.Tensor", "neg.default", "permute_copy.default", "pow.Tensor_Scalar", "rsqrt.default", "sigmoid.default",
        "sin.default", "sqrt.default", "sub.Tensor", "tanh.default", "unsqueeze_copy.default", "view_copy.default",
    )
)  # fmt: skip


#: A pass cuts what joins more than XNNPACK can.
_PARTS = 5


def _is_plain(node: torch.fx.Node) -> bool:
    """Whether a node needs none of those passes."""
    name = getattr(node.target, "__name__", "")
    if name == "aten.cat.default":
        parts: Any = node.args[0]
        return len(parts) <= _PARTS
    return node.op == "placeholder" or name in _PLAIN


#: What ExecuTorch does without a copy, or as fast: no reason to call a delegate.
_MOVES = (
    "view_copy",
    "unsqueeze_copy",
    "squeeze_copy",
    "clone",
    "_clone_dim_order",
    "_to_dim_order_copy",
    "slice_copy",
    "cat",
    "expand_copy",
)


#: `XNN_MAX_TENSOR_DIMS`: a delegate with more can't be loaded.
_AXES = 6


def _has_room(node: torch.fx.Node) -> bool:
    """Whether XNNPACK has tensors with as many axes as those that a node takes and makes."""
    values = (one.meta.get("val") for one in (node, *node.all_input_nodes))
    return all(value.dim() <= _AXES for value in values if isinstance(value, torch.Tensor))


def _shares_memory(source: torch.fx.Node, user: torch.fx.Node) -> bool:
    """Whether XNNPACK may let a result take the memory of an operand that is smaller at other sizes.

    It does so where both are of one size at the first call, and at a larger one it writes beyond the operand's end. What a delegate is given
    from outside it leaves alone.
    """
    operator = getattr(user.target, "_op", None)
    one, other = source.meta.get("val"), user.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if torch.Tag.pointwise not in getattr(operator, "tags", ()) or source.op != "call_function":
        return False
    large = dims(user)
    small = [1] * (len(large) - one.dim()) + list(dims(source))
    different = [(a, b) for a, b in zip(small, large, strict=True) if a != b]
    return bool(different) and all(not isinstance(b, int) for _, b in different)


def _computes(node: torch.fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and not any(part in _MOVES for part in name.split("."))


def partitioner() -> Any:
    """The partitioner."""
    ours = [_REPLACED.get(config, config) for config in ALL_PARTITIONER_CONFIGS]
    return PhasePartitioner(configs=[*(config for config in ours if config is not None), MatmulConfig])
