"""FX graph to OpenVINO nodes: each node through our own table, or else through OpenVINO's frontend."""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import openvino as ov
import torch
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch import ConversionExtension

from polyport_dynamo.lowering.decompose import decompose, remove_dead
from polyport_dynamo.lowering.facts import symbolic
from polyport_dynamo.lowering.functionalize import NotLocal, functionalize
from polyport_openvino import ops
from polyport_openvino.context import Context
from polyport_openvino.decoder import OWN, GraphDecoder
from polyport_openvino.frontend import OPERATORS

Node = torch.fx.Node


#: Names that OpenVINO gives by itself.
_COUNTED = re.compile(r"[A-Z][A-Za-z0-9]*_\d+")


class UnsupportedOperator(RuntimeError):
    """The program calls operators that can't be expressed in OpenVINO; the message lists them."""


class Translator:
    """Says what has a translation, and translates (see `polyport_dynamo.lowering.Operators`).

    Args:
        stateful: Whether caches that grow are going to be variables.
    """

    def __init__(self, *, stateful: bool = False) -> None:
        self._stateful = stateful

    def known(self, node: Node) -> bool:
        """Whether a `call_function` node has a translation."""
        if self.owned(node):
            return True
        if node.target is operator.getitem:
            source: Any = node.args[0]
            return self.known(source)
        return str(node.target) in OPERATORS and not ops.is_complex(node)

    def translates(self, target: Any) -> bool:
        """Whether an operator has a translation, for some of its uses at least."""
        return str(target) in OPERATORS or ops.has(target)

    def owned(self, node: Node) -> bool:
        """Whether a node has a translation of ours."""
        if node.target is operator.getitem:
            source: Any = node.args[0]
            return self.owned(source)
        return node.op == "call_function" and ops.find(node) is not None

    def check(self, graph: torch.fx.Graph) -> None:
        """Raise `UnsupportedOperator` with all operators that have no translation."""
        calls = [node for node in graph.nodes if node.op == "call_function"]
        if missing := sorted({str(node.target) for node in calls if not self.known(node)}):
            raise UnsupportedOperator(f"there is no OpenVINO translation for: {', '.join(missing)}")

    def run(
        self,
        graph: torch.fx.Graph,
        inputs: Sequence[Node],
        results: Sequence[Node],
        tensors: Mapping[Node, torch.Tensor],
        modules: Mapping[str, Any] | None = None,
    ) -> ov.Model:
        """Translate a graph.

        Args:
            graph: Functional and without dead nodes.
            inputs: Its inputs.
            results: Its results.
            tensors: Node -> the tensor that it stands for, of weights and constants.
            modules: What `get_attr` nodes stand for that are graphs of loops.

        Returns:
            A model with a parameter per input and a result per result, in these orders.

        Raises:
            UnsupportedOperator: A node can't be translated.
        """
        decoder = GraphDecoder(graph, list(inputs), list(results), tensors, self.owned)
        context = Context(lambda body: self._body((modules or {})[str(body.target)]), inputs, self._stateful)
        failures: list[tuple[Node, Exception]] = []

        def translate(given: Any) -> list[ov.Output]:
            node, reads = decoder.current, decoder.reads
            if node is None:
                raise RuntimeError("the frontend translates a node that it was not shown")
            try:
                values = {source: given.get_input(index) for index, source in enumerate(reads)}
                return _translated(context, node, values)
            except Exception as error:
                failures.append((node, error))
                raise

        frontend = FrontEndManager().load_by_framework("pytorch")
        frontend.add_extension(ConversionExtension(OWN, translate))
        try:
            return frontend.convert(frontend.load(decoder))
        except Exception as error:
            if failures:
                node, cause = failures[0]
                raise UnsupportedOperator(f"{node.format_node()}: {type(cause).__name__}: {cause}") from cause
            raise UnsupportedOperator(str(error)) from error

    def _body(self, module: torch.fx.GraphModule) -> tuple[ov.Model, list[str]]:
        """The graph of a loop as a model, and the names of its inputs."""
        graph = copy.deepcopy(module.graph)
        try:
            functionalize(graph)
            remove_dead(graph)
            decompose(graph, self.known)
        except NotLocal as error:
            raise UnsupportedOperator(f"the body of a loop: {error}") from error
        remove_dead(graph)
        self.check(graph)
        made: Any = graph.output_node().args[0]
        results = [made] if isinstance(made, Node) else list(made)
        tensors = {
            node: tensor
            for node in graph.find_nodes(op="get_attr")
            if isinstance(tensor := getattr(module, node.target, None), torch.Tensor)
        }
        inputs = list(graph.find_nodes(op="placeholder"))
        model = self.run(graph, inputs, results, tensors, dict(module.named_children()))
        return model, [node.name for node in inputs]


def _translated(c: Context, node: Node, values: Mapping[Node, ov.Output]) -> list[ov.Output]:
    """What our translation of a node makes.

    Args:
        c: The context, which takes the values and the result.
        node: The node.
        values: By node, what the frontend has made of the nodes that it reads.
    """
    for source, value in values.items():
        if source not in c.values:
            c.values[source] = value
            _learn(c, value, source)
    made = _known_size(c, node)
    if made is None and node.target is operator.getitem:
        made = c.values[node.args[0]][node.args[1]]  # type: ignore[index]
    elif made is None:
        translation = ops.find(node)
        if translation is None:
            raise LookupError(f"{node.target} has no translation of ours")
        made = translation(c, node, *node.args, **node.kwargs)
        if isinstance(node.meta.get("val"), torch.SymInt):
            made = c.remember(symbolic(node.meta["val"]), made)
    c.values[node] = made
    if isinstance(made, list):
        return made[:1]
    _learn(c, made, node)
    _name(made.get_node(), node)
    return [made]


def _name(made: Any, node: Node) -> None:
    """Name what a translation has made after its node, behind the part of the model that it comes from."""
    if made.get_type_name() == "Constant" or not _COUNTED.fullmatch(made.get_friendly_name()):
        return  # it was made for another node
    stack = node.meta.get("nn_module_stack") or {}
    path = next((str(entry[0]) for entry in reversed(stack.values())), "")
    made.set_friendly_name(f"{path}/{node.name}" if path and not path.startswith("_") else str(node.name))


def _known_size(c: Context, node: Node) -> Any:
    """The value of a node that is a size, where an equal one is there already or can be computed."""
    size = node.meta.get("val")
    return c.expression(symbolic(size)) if isinstance(size, torch.SymInt) else None


def _learn(c: Context, value: ov.Output, node: Node) -> None:
    fake = node.meta.get("val")
    if isinstance(fake, torch.Tensor) and not fake.dtype.is_complex:
        c.learn_sizes(value, fake)
