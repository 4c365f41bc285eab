"""Which operators of a graph make one delegate.

ExecuTorch's own partitioner makes partitions that depend on each other in a circle, and looks for the largest ones in a time that grows
with the square of the graph. Here the graph is cut into phases: all that a delegate can compute before something else is needed,
then what it can't, and so on. No order has fewer delegates, and phases can't wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Node = torch.fx.Node


def phases(
    graph: torch.fx.Graph,
    groups: Sequence[Sequence[Node]],
    worth: Callable[[Node], bool],
    apart: Callable[[Node, Node], bool] | None = None,
) -> list[list[Node]]:
    """The nodes of each delegate, in the order of the graph.

    Args:
        graph: The graph.
        groups: What a delegate takes, nodes that need each other together.
        worth: Whether a node is reason enough for a delegate; one without any such node is left out.
        apart: Whether a node and one that takes it must not be in one delegate.
    """
    chosen = list(groups)
    while True:
        group_of = {node: index for index, group in enumerate(chosen) for node in group}
        numbers = _numbers(graph, chosen, group_of, apart)
        found: dict[int, list[Node]] = {}
        for node in graph.nodes:
            if node in group_of:
                found.setdefault(numbers[node], []).append(node)
        poor = {
            node
            for nodes in found.values()
            for part in _connected(nodes, chosen, group_of)
            if not any(map(worth, part))
            for node in part
        }
        if not poor:
            return [found[number] for number in sorted(found)]
        # without them what comes behind may start earlier
        chosen = [group for group in chosen if group[0] not in poor]


def _connected(
    nodes: Sequence[Node], groups: Sequence[Sequence[Node]], group_of: dict[Node, int]
) -> list[list[Node]]:
    """The nodes of one phase, apart where nothing passes from one to the other."""
    left, found = set(nodes), []
    while left:
        waiting, part = [left.pop()], []
        while waiting:
            part.append(node := waiting.pop())
            near = {*node.all_input_nodes, *node.users, *groups[group_of[node]]} & left
            left -= near
            waiting.extend(near)
        found.append(part)
    return found


def _numbers(
    graph: torch.fx.Graph,
    groups: Sequence[Sequence[Node]],
    group_of: dict[Node, int],
    apart: Callable[[Node, Node], bool] | None,
) -> dict[Node, int]:
    """Node -> its phase: that of the delegate, or of the one after which it is computed (-1: before the first)."""
    numbers: dict[Node, int] = {}
    least = [0] * len(groups)
    for _ in range(len(groups) + 1):
        behind = list(least)
        for node in graph.nodes:
            group = group_of.get(node)
            number = -1
            for source in node.all_input_nodes:
                waits = group is not None and (
                    source not in group_of or (apart is not None and apart(source, node))
                )
                number = max(number, numbers[source] + waits)
            if group is not None:
                number = least[group] = max(number, least[group])
            numbers[node] = number
        # those of a group start together, so the first of them may have to wait for what its last one needs
        if all(least[i] == behind[i] for i, group in enumerate(groups) if len(group) > 1):
            return numbers
    raise ValueError("nodes that a delegate takes together depend on what it can't compute in between")
