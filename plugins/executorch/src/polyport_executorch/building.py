"""Writing nodes into a traced graph, with the values that the tracer would have recorded."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from polyport_dynamo.lowering import internals
from polyport_dynamo.lowering.facts import dims

Node = torch.fx.Node
aten = torch.ops.aten

#: Views of a weight that take no memory.
_ORDERS = {aten.transpose.int, aten.permute.default, aten.t.default}

#: Writes what a node computes in other operators; None where it has to stay.
Rule = Callable[["Builder", Node], Node | None]


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by name, with the schema's defaults."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False))
    defaults = {
        argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()
    }
    return {**defaults, **given, **node.kwargs}


class Builder:
    """Writes nodes where the graph's insertion point is.

    Args:
        graph: Functional; changed.
        inputs: Placeholders of what a caller passes.
        contents: Placeholder of a weight or constant -> its tensor.
    """

    def __init__(
        self, graph: torch.fx.Graph, inputs: list[Node], contents: Mapping[Node, torch.Tensor]
    ) -> None:
        self.graph = graph
        self.inputs = inputs
        #: Placeholder -> the tensor that it stands for.
        self.constants: dict[Node, torch.Tensor] = {}
        #: Placeholders whose sizes are not to be read.
        self.hidden: set[Node] = set()
        self._contents = contents
        self._known: dict[Any, Node] = {}
        self._first = next(iter(graph.nodes))
        self._mode: FakeTensorMode | None = next(
            (
                value.fake_mode
                for node in graph.nodes
                if isinstance(value := node.meta.get("val"), torch.Tensor) and hasattr(value, "fake_mode")
            ),
            None,
        )

    def replace(self, rule_of: Callable[[Node], Rule | None]) -> None:
        """Replace nodes by what rules write for them.

        Args:
            rule_of: The rule of a node, None where it stays.
        """
        for node in list(self.graph.nodes):
            plain = node.op == "call_function" and isinstance(
                node.meta.get("val"), (torch.Tensor, tuple, list)
            )
            rule = rule_of(node) if plain else None
            if rule is None:
                continue
            with self.graph.inserting_before(node):
                made = rule(self, node)
            if made is not None:
                made.meta.setdefault("nn_module_stack", node.meta.get("nn_module_stack"))
                node.replace_all_uses_with(made)
                self.graph.erase_node(node)
        self.graph.eliminate_dead_code()

    def op(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new call."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self.run(node)
        return node

    def run(self, node: Node) -> Any:
        """What a node makes of the values that its arguments have now."""
        with self._mode or contextlib.nullcontext():  # sizes alone don't say what to compute with
            return internals.run_fake(node)

    def constant(self, key: Any, make: Callable[[], torch.Tensor]) -> Node:
        """A tensor that the program brings; the same for equal keys."""
        if key not in self._known:
            tensor = make()
            node = self.buffer(f"c_polyport_{len(self.constants)}", tensor)
            self.constants[node] = tensor
            self._known[key] = node
        return self._known[key]

    def buffer(self, name: str, content: torch.Tensor) -> Node:
        """A placeholder before all others.

        Args:
            name: Of the placeholder.
            content: The tensor that it stands for.
        """
        with self.graph.inserting_before(self._first):
            node = self.graph.placeholder(name)
        mode = self._mode
        node.meta["val"] = content if mode is None else mode.from_tensor(content, static_shapes=True)
        return node

    def fake(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A tensor as the tracer has them, without memory.

        Args:
            make: Makes it.
        """
        with self._mode or contextlib.nullcontext():
            return make()

    def number(self, value: float, dtype: torch.dtype = torch.float32) -> Node:
        """A number, as a tensor with one axis: XNNPACK knows none without."""
        return self.constant(("number", value, dtype), lambda: torch.full((1,), value, dtype=dtype))

    def piece(self, value: Node, index: int, axis: int = 0, *, turned: bool = False) -> Node:
        """One of what lies along an axis; of a weight a constant of its own, which delegates can pack.

        Args:
            value: What has the axis.
            index: Which of them.
            axis: The axis, which the result lacks.
            turned: Whether the last two axes of the result change places.
        """
        tensor = self.content(value)
        if tensor is None:
            made = self.op(aten.select.int, value, axis, index)
            return self.op(aten.transpose.int, made, -1, -2) if turned else made

        def cut() -> torch.Tensor:
            part = tensor.detach().select(axis, index)
            return (part.transpose(-1, -2) if turned else part).contiguous()

        return self.constant(("piece", value, index, axis, turned), cut)

    def opened(self, value: Node, axis: int) -> Node:
        """A tensor with one more axis of size 1; of a weight a constant, which shares its memory.

        Args:
            value: The tensor.
            axis: Where the axis is.
        """
        tensor = self.content(value)
        if tensor is None:
            return self.op(aten.unsqueeze.default, value, axis)
        return self.constant(("opened", value, axis), lambda: tensor.detach().unsqueeze(axis))

    def content(self, value: Node) -> torch.Tensor | None:
        """The tensor of a weight, or of one with its axes in another order; None for what is computed."""
        if value.target in _ORDERS and isinstance(value.args[0], Node):
            source = self.content(value.args[0])
            return None if source is None else value.target(source, *value.args[1:])
        return self._contents.get(value, self.constants.get(value))

    def size(self, node: Node, axis: int) -> Any:
        """A size of a node as an argument; one that varies is read from an input where one has it.

        ExecuTorch reads sizes of what a delegate returns as they were planned, not as they came out.
        """
        found = self.known_size(dims(node)[axis])
        return self.op(aten.sym_size.int, node, axis) if found is None else found

    def known_size(self, expression: Any) -> Any:
        """A size as an argument: a number, or the size of an input; None where no input has it.

        Args:
            expression: As `polyport_dynamo.lowering.facts.dims` has it.
        """
        if isinstance(expression, int):
            return expression
        for source in self.graph.find_nodes(op="placeholder"):
            value = source.meta.get("val")
            if source in self.hidden or not isinstance(value, torch.Tensor):
                continue
            if expression in (sizes := dims(source)):
                return self.once(
                    ("size", expression),
                    source,
                    lambda: self.op(aten.sym_size.int, source, sizes.index(expression)),  # noqa: B023
                )
        return None

    def plus(self, size: Any, other: Any) -> Any:
        """The sum of two sizes."""
        return self.of_sizes(operator.add, size, other)

    def times(self, size: Any, count: Any) -> Any:
        """A size times a number or another size.

        Written out, since what torch infers for a size of -1 is an expression that it later compares by the sample's sizes.
        """
        return self.of_sizes(operator.mul, size, count)

    def of_sizes(self, compute: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
        """What is computed of two sizes: a number if both are, and a node otherwise."""
        fixed = not isinstance(one, Node) and not isinstance(other, Node)
        return compute(one, other) if fixed else self.op(compute, one, other)

    def once(self, key: Any, after: Node, make: Callable[[], Node]) -> Node:
        """What `make` writes behind a node; the same for equal keys.

        Args:
            key: Hashable.
            after: What it is made of.
            make: Writes it.
        """
        if key not in self._known:
            following = after.next
            while following.op == "placeholder":
                following = following.next
            with self.graph.inserting_before(following):
                self._known[key] = make()
        return self._known[key]

    def first(self, key: Any, node: Node) -> Node:
        """The node that was given first for a key: it computes what all others do.

        Args:
            key: Hashable, with all that the node depends on.
            node: One of them, in the order of the graph.
        """
        return self._known.setdefault(key, node)
