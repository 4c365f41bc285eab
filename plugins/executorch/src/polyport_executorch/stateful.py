"""Caches inside the program: what goes in and comes out at every step becomes a mutable buffer.

A buffer has room for the largest cache. A step writes its tokens behind those that are there and reads as much as the cache is long, so
nothing passes between the program and its caller. A second method, `state`, gives out the buffers themselves: by their memory a caller
that runs in the same process reads, fills and reorders what is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from polyport.errors import ConfigError
from polyport.metadata import ExportMetadata, TensorInfo
from polyport_dynamo.lowering import Leaves
from polyport_dynamo.lowering.caches import eligible, growing_axis
from polyport_dynamo.lowering.facts import dims, traced
from polyport_executorch.building import Builder
from polyport_executorch.kept import table_of

Node = torch.fx.Node
aten = torch.ops.aten


@attrs.frozen(eq=False)
class Buffer:
    """One cache that a program keeps.

    Args:
        name: Of the buffer.
        before: Its placeholder.
        after: Its content after a step.
        content: Its content before the first step.
    """

    name: str
    before: Node
    after: Node
    content: torch.Tensor


@attrs.frozen(eq=False)
class State:
    """What a program keeps.

    Args:
        leaves: The leaves that are kept, in the order of `buffers`.
        buffers: Where.
        length: Placeholder of a tensor that is as long as the caches are; its content is not read. None where none grows.
        removed: Placeholders that are inputs no more.
    """

    leaves: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    length: Node | None
    removed: frozenset[Node]


def make_stateful(
    builder: Builder, metadata: ExportMetadata, leaves: Leaves, results: list[Node]
) -> State | None:
    """Turn the caches of a graph into buffers, in place.

    Args:
        builder: Of the graph.
        metadata: The record of the traced graph, in which all axes are bounded.
        leaves: What goes in and out.
        results: What is computed, then the contents of changed inputs.

    Returns:
        What is kept; None where the graph takes no cache. The graph's results are then the buffers' contents before all others.

    Raises:
        ConfigError: A cache is not one that the program can keep.
    """
    names = eligible(metadata, leaves)
    if not names:
        return None
    inputs, outputs = ({info.name: info for info in infos} for infos in (metadata.inputs, metadata.outputs))
    given = dict(zip(leaves.inputs, builder.inputs, strict=True))
    made = dict(zip((*leaves.computed, *leaves.in_place), results, strict=True))
    caches = [_Cache(given[name], made[name], inputs[name], outputs[name], metadata) for name in names]
    lengths = {dims(cache.before)[cache.axis] for cache in caches if cache.axis is not None}
    if len(lengths) > 1:
        raise ConfigError(
            "stateful=True keeps caches that are all of one length; this model's are not. Leave it out.",
            backend="executorch",
        )
    removed = [given[name] for name in names]
    writer = _Writer(builder, removed, lengths.pop() if lengths else None)
    buffers = tuple(writer.keep(f"state_{index}", cache) for index, cache in enumerate(caches))
    others = [result for name, result in made.items() if name not in names]
    builder.graph.output_node().args = ((*(one.after for one in buffers), *others),)
    builder.inputs = [node for node in builder.inputs if node not in removed]
    builder.graph.eliminate_dead_code()
    for node in removed:
        builder.graph.erase_node(node)
    return State(names, buffers, writer.length, frozenset(removed))


class _Cache:
    """One cache as an input and as an output.

    Args:
        before: Its placeholder.
        after: The node of what it becomes.
        info: As an input.
        grown: As an output.
        metadata: The record of the graph.

    Raises:
        ConfigError: It grows otherwise than by the tokens of a step behind those that it has.
    """

    def __init__(
        self, before: Node, after: Node, info: TensorInfo, grown: TensorInfo, metadata: ExportMetadata
    ) -> None:
        self.before, self.after = before, after
        self.axis = growing_axis(info, grown)
        self.new: Node | None = None
        if self.axis is not None:
            joined = _joined(after, before, self.axis)
            if joined is None:
                raise ConfigError(
                    f"stateful=True keeps caches that a step appends to; {info.name!r} changes otherwise. Leave it out.",
                    backend="executorch",
                )
            self.new = joined
        #: The largest size of each axis.
        self.largest = table_of(grown, metadata)


def _joined(after: Node, before: Node, axis: int) -> Node | None:
    """What is appended to a cache along an axis."""
    if after.target is not aten.cat.default:
        return None
    parts: Any = after.args[0]
    along: Any = after.args[1] if len(after.args) > 1 else after.kwargs.get("dim", 0)
    fits = len(parts) == 2 and parts[0] is before and along % traced(after).dim() == axis
    return parts[1] if fits else None


class _Writer:
    """Writes what reads and writes the buffers.

    Args:
        builder: Of the graph.
        removed: Placeholders that are going to be removed.
        length: The size that says how long the caches are; None where none grows.
    """

    def __init__(self, builder: Builder, removed: Sequence[Node], length: Any) -> None:
        self._b = builder
        self.length = None if length is None else self._length_input(removed, length)
        builder.hidden.update(removed)
        for node in removed:
            self._replace_sizes(node)
        # behind the inputs and the sizes that are read from them
        self._first = next(
            node
            for node in builder.graph.nodes
            if node.op != "placeholder" and node.target is not aten.sym_size.int
        )
        self._known: dict[Any, Node] = {}

    def _length_input(self, removed: Sequence[Node], length: Any) -> Node:
        b = self._b
        source = next(node for node in removed if length in dims(node))
        past = traced(source).shape[dims(source).index(length)]
        *_, last = b.graph.find_nodes(op="placeholder")
        with b.graph.inserting_after(last):
            made = b.graph.placeholder("state_length")
        made.meta["val"] = b.fake(lambda: torch.empty((past,), dtype=torch.int64))
        return made

    def keep(self, name: str, cache: _Cache) -> Buffer:
        """Let a buffer take the place of a cache."""
        if cache.axis is None or cache.new is None:
            return self._fixed(name, cache)
        return self._growing(name, cache, cache.axis, cache.new)

    def _replace_sizes(self, node: Node) -> None:
        """Sizes of a cache, from other inputs that have them."""
        for user in list(node.users):
            if user.target is aten.sym_size.int:
                along: Any = user.args[1]
                size = self._size(dims(node)[along])
                for reader in list(user.users):
                    reader.args, reader.kwargs = torch.fx.map_arg(
                        (reader.args, reader.kwargs),
                        lambda one: size if one is user else one,  # noqa: B023
                    )
                self._b.graph.erase_node(user)

    def _growing(self, name: str, cache: _Cache, axis: int, new: Node) -> Buffer:
        """A table: the places of the first head of the first row, then those of the next."""
        b, inner = self._b, cache.largest[axis + 1 :]
        table = (math.prod(cache.largest[: axis + 1]), *inner)
        content = torch.zeros(table, dtype=traced(cache.before).dtype)
        buffer = b.buffer(name, content)
        sizes = [self._size(size) for size in dims(new)[:axis]]
        past, step = self._size(dims(cache.before)[axis]), self._size(dims(new)[axis])
        with b.graph.inserting_before(self._first):
            end = self._sum(past, step)
            written = self._places(cache, axis, sizes, past, end)
            taken = self._places(cache, axis, sizes, 0, end)
        with b.graph.inserting_before(cache.after):
            rows = b.op(aten.reshape.default, new, [-1, *inner])
            after = b.op(aten.index_put.default, buffer, [written], rows)
            whole = b.op(aten.index_select.default, after, 0, taken)
            whole = b.op(aten.reshape.default, whole, [*sizes, end, *inner])
        whole.meta["val"] = traced(cache.after)
        cache.after.replace_all_uses_with(whole)
        if others := [user for user in cache.before.users if user is not cache.after]:
            with b.graph.inserting_before(self._first):
                places = self._places(cache, axis, sizes, 0, past)
                old = b.op(aten.index_select.default, buffer, 0, places)
                old = b.op(aten.reshape.default, old, [*sizes, past, *inner])
            cache.before.replace_all_uses_with(old, delete_user_cb=lambda user: user in others)
        return Buffer(name, buffer, after, content)

    def _fixed(self, name: str, cache: _Cache) -> Buffer:
        """A state of one size: the first rows are those of the batch."""
        b = self._b
        content = torch.zeros(cache.largest, dtype=traced(cache.before).dtype)
        buffer = b.buffer(name, content)
        batch = self._size(dims(cache.before)[0])
        with b.graph.inserting_before(self._first):
            rows = b.op(aten.arange.default, batch)
            old = b.op(aten.index_select.default, buffer, 0, rows)
        cache.before.replace_all_uses_with(old)
        with b.graph.inserting_before(b.graph.output_node()):
            after = b.op(aten.index_put.default, buffer, [rows], cache.after)
        return Buffer(name, buffer, after, content)

    def _sum(self, one: Any, other: Any) -> Any:
        """A size that several caches have in common: the same node for each."""
        if (one, other) not in self._known:
            self._known[one, other] = self._b.plus(one, other)
        return self._known[one, other]

    def _places(self, cache: _Cache, axis: int, sizes: list[Any], start: Any, end: Any) -> Node:
        """Where in a table the tokens from one place to another are, for all rows and heads; the same for caches alike."""
        b = self._b
        key = (*sizes, *cache.largest[: axis + 1], start, end)
        if key not in self._known:
            made = b.op(aten.arange.default, sizes[0])
            for size, largest in zip((*sizes[1:], None), cache.largest[1 : axis + 1], strict=True):
                along = (
                    b.op(aten.arange.start, start, end) if size is None else b.op(aten.arange.default, size)
                )
                made = b.op(aten.mul.Tensor, made, b.number(largest, torch.int64))
                made = b.op(aten.add.Tensor, b.op(aten.unsqueeze.default, made, -1), along)
            self._known[key] = b.op(aten.reshape.default, made, [-1])
        return self._known[key]

    def _size(self, expression: Any) -> Any:
        found = self._b.known_size(expression)
        if found is None:
            raise ConfigError(
                f"stateful=True needs every size of a cache among those of the inputs; {expression} is none. Leave it out.",
                backend="executorch",
            )
        return found


def state_program(state: State) -> torch.export.ExportedProgram:
    """The method that gives out the buffers."""

    class Buffers(torch.nn.Module):
        def forward(self) -> tuple[torch.Tensor, ...]:
            return tuple(self.get_buffer(one.name) for one in state.buffers)

    module = Buffers()
    for one in state.buffers:
        module.register_buffer(one.name, one.content)
    return torch.export.export(module, ())
