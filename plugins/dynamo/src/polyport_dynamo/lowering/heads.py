"""Heads of keys and values that several heads of queries share."""

from __future__ import annotations

from typing import Any

import torch

from polyport_dynamo.lowering.facts import dims, is_whole, traced

aten = torch.ops.aten
Node = torch.fx.Node

_RESHAPES = {aten.reshape.default, aten.view.default, aten._unsafe_view.default}


def shared_heads(query: Node, key: Node, value: Node, enable_gqa: bool) -> tuple[Node, Node] | None:
    """Keys and values with fewer heads than the queries have, before any is repeated; None where there are no such.

    To repeat them copies the whole of a cache for every token: for 30 layers and 512 places a tenth of its time.

    Args:
        query: `[batch, heads, queries, width]`.
        key: `[batch, heads or fewer, keys, width]`.
        value: The same.
        enable_gqa: Whether keys and values may have fewer heads as they are.
    """
    sources = (key, value) if enable_gqa else (unrepeated(key), unrepeated(value))
    if not all(traced(node).dim() == 4 for node in (query, *sources)):
        return None
    heads, *fewer = (dims(node)[1] for node in (query, *sources))
    if not isinstance(heads, int) or not isinstance(fewer[0], int) or fewer[0] != fewer[1]:
        return None
    return sources if heads != fewer[0] and heads % fewer[0] == 0 else None


def unrepeated(node: Node) -> Node:
    """What a head or several copies of it side by side are made of: `x[:, :, None].expand(...).reshape(...)`.

    Args:
        node: Keys or values.

    Returns:
        The heads before they were repeated; the node itself where they were not.
    """
    chain = [node]
    for targets in (_RESHAPES, {aten.expand.default}, {aten.unsqueeze.default}):
        source = chain[-1].args[0] if chain[-1].target in targets else None
        if not isinstance(source, torch.fx.Node):
            return node
        chain.append(_uncut(source))
    _, spread, opened, source = chain
    axis: Any = opened.args[1]  # copies before the heads would be the same heads in another order
    if (
        traced(source).dim() != 4
        or traced(node).dim() != 4
        or traced(spread).dim() != 5
        or axis not in (2, -3)
    ):
        return node
    batch, heads, length, width = dims(source)
    repeats = dims(spread)[2]
    if not isinstance(heads, int) or not isinstance(repeats, int):
        return node
    fits = dims(spread) == [batch, heads, repeats, length, width]
    return source if fits and dims(node) == [batch, heads * repeats, length, width] else node


def _uncut(node: Node) -> Node:
    """What a node is before it was cut along axes of which all was taken: the tracer keeps each `:` of an index."""
    while node.target is aten.slice.Tensor:
        source = node.args[0]
        cut: Any = dict(zip(("dim", "start", "end", "step"), node.args[1:], strict=False))
        if not isinstance(source, Node) or cut.get("step", 1) != 1:
            break
        if not is_whole(dims(source)[cut.get("dim", 0)], cut.get("start"), cut.get("end")):
            break
        node = source
    return node
