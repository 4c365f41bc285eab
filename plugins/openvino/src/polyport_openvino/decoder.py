"""How OpenVINO's PyTorch frontend sees a graph: node by node, through a decoder that it calls.

The frontend's own decoder takes a program that was decomposed as a whole. This one takes the graph as it was traced: nodes that
have a translation of ours appear as calls of one operator, which is an extension of the frontend; all others are the frontend's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import openvino as ov
import torch
from openvino.frontend.pytorch import fx_decoder
from openvino.frontend.pytorch.utils import pt_to_ov_type_map, torch_tensor_to_ov_const

Node = torch.fx.Node

#: The operator type under which nodes with a translation of ours appear.
OWN = "polyport::call"

#: Key of a node's `meta`: the name that a weight has in the model.
WEIGHT = "weight"


class Nodes(list[Node]):
    """The nodes of a graph. The frontend's decoders ask for the place of each of a node's inputs."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        super().__init__(graph.nodes)
        self._places = {node: index for index, node in enumerate(self)}

    def index(self, node: Node, *_: Any) -> int:
        """The place of a node, without looking at the others."""
        return self._places[node]


def constant(tensor: torch.Tensor) -> Any:
    """A constant that shares its memory with a tensor."""
    return torch_tensor_to_ov_const(tensor.detach(), shared_memory=True)


def element_type(dtype: torch.dtype) -> ov.Type:
    """OpenVINO's counterpart of a dtype.

    Raises:
        ValueError: There is none.
    """
    found = pt_to_ov_type_map.get(str(dtype))
    if found is None:
        raise ValueError(f"OpenVINO has no element type for {dtype}")
    return found


class GraphDecoder(fx_decoder.BaseFXDecoder):
    """Shows a graph.

    Args:
        graph: Functional.
        inputs: Its inputs, in order.
        results: Its results, in order.
        tensors: Node -> the tensor that it stands for, of weights and constants.
        owned: Whether a node has a translation of ours.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        inputs: list[Node],
        results: list[Node],
        tensors: Mapping[Node, torch.Tensor],
        owned: Callable[[Node], bool],
    ) -> None:
        super().__init__()
        self.nodes = Nodes(graph)
        self._placeholders = inputs
        #: The node that the frontend is at.
        self.current: Node | None = None
        #: What the frontend hands to the translation of that node, if it is ours.
        self.reads: list[Node] = []
        self._tensors, self._owned = tensors, owned
        self._inputs = [self.nodes.index(node) for node in inputs]
        self._outputs = [("", self.nodes.index(node)) for node in results]

    def visit_subgraph(self, visit: Any) -> None:
        """Show the nodes, in order. The first of ours gets all inputs with open sizes, so that the sizes are known."""
        taken = set(self._placeholders)
        opening = [
            node for node in self._placeholders if any(not isinstance(n, int) for n in node.meta["val"].shape)
        ]
        for node in self.nodes:
            if node in self._tensors:
                decoder: Any = _TensorDecoder(node, self.nodes, self._tensors[node])
            elif node in taken or node.op != "call_function":
                continue
            elif self._owned(node):
                given = sources(node)
                self.reads = [*given, *(source for source in opening if source not in given)]
                opening = []
                decoder = _OwnDecoder(node, self.nodes, self.reads)
            else:
                decoder = _NodeDecoder(node, self.nodes)
            self.m_decoders.append(decoder)
            self.current = node
            visit(decoder)

    def get_input_signature_name(self, index: int) -> str:
        """The name of an input."""
        return str(self._placeholders[index].name)

    def get_input_shape(self, index: int) -> ov.PartialShape:
        """The shape of an input, with -1 for what may vary."""
        shape = self._placeholders[index].meta["val"].shape
        return ov.PartialShape([size if isinstance(size, int) else -1 for size in shape])

    def get_input_type(self, index: int) -> ov.OVAny:
        """The element type of an input."""
        return ov.OVAny(element_type(self._placeholders[index].meta["val"].dtype))

    def get_output_debug_name(self, index: int) -> str:
        """A name for a result; the graph's own are given later."""
        return f"result_{index}"

    def get_output_shape(self, index: int) -> ov.PartialShape:
        """The shape of a result, which follows from the graph."""
        del index
        return ov.PartialShape.dynamic()

    def get_input_strides(self, index: int) -> list[int]:
        """The inputs lie in rows."""
        del index
        return []

    def num_of_outputs(self) -> int:
        """How many results there are."""
        return len(self._outputs)

    def outputs(self) -> list[int]:
        """The places of the results."""
        return [place for _, place in self._outputs]

    def get_op_type(self) -> str:
        """The graph as a whole."""
        return "UNKNOWN_TYPE_graph"


class _NodeDecoder(fx_decoder.TorchFXPythonDecoder):
    """Shows a node to the frontend's translations."""

    def __init__(self, node: Node, nodes: Nodes) -> None:
        super().__init__(node, None, nodes)
        self._place = nodes.index(node)

    def get_output_debug_name(self, index: int) -> str:
        """A number: where two nodes have one value, the frontend reads back one of its names and expects its own."""
        del index
        return str(self._place)


class _TensorDecoder(_NodeDecoder):
    """Shows a weight."""

    def __init__(self, node: Node, nodes: Nodes, tensor: torch.Tensor) -> None:
        super().__init__(node, nodes)
        self._tensor = tensor

    def get_op_type(self) -> str:
        """A constant."""
        return "get_attr"

    def as_constant(self) -> Any:
        """The constant, with the name that the weight has in the model."""
        made = constant(self._tensor)
        made.set_friendly_name(str(self.pt_module.meta.get(WEIGHT, self.pt_module.name)))
        return made.outputs()


class _OwnDecoder(_NodeDecoder):
    """Shows a node that has a translation of ours, with the values that it is given."""

    def __init__(self, node: Node, nodes: Nodes, reads: list[Node]) -> None:
        super().__init__(node, nodes)
        self._inputs = [nodes.index(source) for source in reads]
        self.input_types = [ov.OVAny(ov.Type.dynamic)] * len(self._inputs)

    def get_op_type(self) -> str:
        """The one operator of all of them."""
        return OWN

    def output_list_size(self) -> int:
        """Several results are handed on between translations of ours."""
        return 0


def sources(node: Node) -> list[Node]:
    """The values that a node reads; graphs that it calls are none."""
    return [
        source
        for source in node.all_input_nodes
        if source.op != "get_attr" or isinstance(source.meta.get("val"), torch.Tensor)
    ]


__all__ = ["OWN", "GraphDecoder", "Nodes", "constant", "element_type", "sources"]
