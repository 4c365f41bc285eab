"""FX graph to OpenVINO nodes: each node through our own table, or else through OpenVINO's frontend."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import openvino as ov
import torch
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch import ConversionExtension

from polyport_openvino import ops
from polyport_openvino.context import Context
from polyport_openvino.decoder import OWN, GraphDecoder, sources
from polyport_openvino.frontend import OPERATORS

Node = torch.fx.Node


class UnsupportedOperator(RuntimeError):
    """The program calls operators that can't be expressed in OpenVINO; the message lists them."""


class Translator:
    """Says what has a translation, and translates (see `polyport_dynamo.lowering.Operators`)."""

    def known(self, node: Node) -> bool:
        """Whether a `call_function` node has a translation."""
        return self.owned(node) or self.translates(node.target) or node.target is operator.getitem

    def translates(self, target: Any) -> bool:
        """Whether the frontend has a translation of an operator."""
        return str(target) in OPERATORS

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
    ) -> ov.Model:
        """Translate a graph.

        Args:
            graph: Functional and without dead nodes.
            inputs: Its inputs.
            results: Its results.
            tensors: Node -> the tensor that it stands for, of weights and constants.

        Returns:
            A model with a parameter per input and a result per result, in these orders.

        Raises:
            UnsupportedOperator: A node can't be translated.
        """
        decoder = GraphDecoder(graph, list(inputs), list(results), tensors, self.owned)
        context = Context()
        failures: list[tuple[Node, Exception]] = []

        def translate(given: Any) -> list[ov.Output]:
            node = decoder.current
            assert node is not None
            try:
                values = [given.get_input(index) for index in range(len(sources(node)))]
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


def _translated(c: Context, node: Node, values: Sequence[ov.Output]) -> list[ov.Output]:
    for source, value in zip(sources(node), values, strict=True):
        if source not in c.values:
            c.values[source] = value
            fake = source.meta.get("val")
            if source.op == "placeholder" and isinstance(fake, torch.Tensor):
                c.learn_sizes(value, fake)
    if node.target is operator.getitem:
        made: Any = c.values[node.args[0]][node.args[1]]  # type: ignore[index]
    else:
        translation = ops.find(node)
        assert translation is not None
        made = translation(c, node, *node.args, **node.kwargs)
    c.values[node] = made
    if isinstance(made, list):
        return made[:1]
    made.get_node().set_friendly_name(node.name)
    return [made]
