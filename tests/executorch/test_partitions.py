"""Which nodes make one delegate: no circles, no more delegates than needed, none that only moves numbers."""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping, Sequence

import pytest
import torch

from polyport_executorch.partitions import phases

Node = torch.fx.Node

#: Node -> what it takes, apart by spaces; what takes nothing is an input. In the order of the graph.
Wiring = Mapping[str, str]


def drawn(wiring: Wiring) -> tuple[torch.fx.Graph, dict[str, Node]]:
    """A graph, and its nodes by name."""
    graph = torch.fx.Graph()
    nodes: dict[str, Node] = {}
    for name, takes in wiring.items():
        args = tuple(nodes[other] for other in takes.split())
        nodes[name] = graph.call_function(operator.add, args) if args else graph.placeholder(name)
    graph.output(tuple(nodes.values()))
    return graph, nodes


def cut(wiring: Wiring, *groups: str, moves: str = "", apart: Sequence[tuple[str, str]] = ()) -> list[str]:
    """The delegates, each as the names of its nodes.

    Args:
        wiring: The graph.
        groups: What a delegate takes: names of nodes that need each other, apart by spaces.
        moves: Those that are no reason for a delegate.
        apart: Pairs that must not be in one delegate.
    """
    graph, nodes = drawn(wiring)
    names = {node: name for name, node in nodes.items()}
    chosen = [[nodes[name] for name in group.split()] for group in groups]
    found = phases(
        graph,
        chosen,
        lambda node: names[node] not in moves.split(),
        lambda source, user: (names[source], names[user]) in apart,
    )
    return [" ".join(names[node] for node in part) for part in found]


# ── as few as there can be ──────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_taken() -> None:
    assert cut({"x": "", "p": "x"}) == []


def test_all_in_one() -> None:
    assert cut({"x": "", "a": "x", "b": "a", "c": "a b"}, "a", "b", "c") == ["a b c"]


def test_what_must_be_apart_is_in_two() -> None:
    wiring = {"x": "", "a": "x", "b": "a", "c": "x", "d": "b c"}
    assert cut(wiring, "a", "b", "c", "d", apart=[("a", "b")]) == ["a c", "b d"]
    assert cut(wiring, "a", "b", "c", "d", apart=[("x", "a"), ("c", "d")]) == ["a b c", "d"]


def test_what_is_behind_a_kernel_is_another() -> None:
    wiring = {"x": "", "a": "x", "b": "a", "p": "b", "c": "p", "d": "c a"}
    assert cut(wiring, "a", "b", "c", "d") == ["a b", "c d"]


def test_a_kernel_in_front_starts_no_phase_of_its_own() -> None:
    assert cut({"x": "", "p": "x", "a": "p", "b": "x"}, "a", "b") == ["a b"]


def test_several_kernels_in_a_row_are_one_gap() -> None:
    wiring = {"x": "", "a": "x", "p": "a", "q": "p", "r": "q", "b": "r"}
    assert cut(wiring, "a", "b") == ["a", "b"]


def test_branches_of_different_depth_share_phases() -> None:
    """One branch leaves the delegate once and the other twice: what is at the same depth is computed at once."""
    wiring = {
        "x": "", "a": "x", "p": "a", "b": "p", "q": "b", "c": "q",
        "k": "x", "l": "k", "r": "l", "m": "r", "end": "c m",
    }  # fmt: skip
    assert cut(wiring, "a", "b", "c", "k", "l", "m", "end") == ["a k l", "b m", "c end"]


def test_two_that_would_wait_for_each_other() -> None:
    """Each of two pairs could be one delegate, but not both of them: each would need what the other computes."""
    wiring = {"x": "", "y": "", "a": "x", "b": "y", "p": "a", "q": "b", "c": "p b", "d": "q a"}
    assert cut(wiring, "a", "b", "c", "d") == ["a b", "c d"]


def test_order_is_that_of_the_graph_whatever_the_order_of_the_groups() -> None:
    wiring = {"x": "", "a": "x", "b": "a", "p": "b", "c": "p", "d": "c"}
    assert cut(wiring, "d", "b", "c", "a") == ["a b", "c d"]


@pytest.mark.parametrize("seed", range(60))
def test_any_graph(seed: int) -> None:
    """All is in one delegate, nothing waits in a circle, and there are as few as the longest way through the graph asks for."""
    dice = random.Random(seed)
    wiring, taken = thrown(dice)
    found = [part.split() for part in cut(wiring, *taken)]
    assert sorted(name for part in found for name in part) == sorted(taken)
    assert_no_circle(wiring, found)
    # each time that a way leaves the delegates and comes back, whatever the order, it takes another delegate
    assert len(found) == max((ways(wiring, name, taken) for name in taken), default=0)


@pytest.mark.parametrize("seed", range(60))
def test_any_graph_with_moves(seed: int) -> None:
    """What computes is in one delegate, each has something that does, and nothing waits in a circle."""
    dice = random.Random(seed)
    wiring, taken = thrown(dice)
    moves = [name for name in taken if dice.random() < 0.5]
    computed = [name for name in taken if name not in moves]
    found = [part.split() for part in cut(wiring, *taken, moves=" ".join(moves))]
    names = [name for part in found for name in part]
    assert set(computed) <= set(names) <= set(taken)
    assert len(names) == len(set(names))
    assert all(set(part) & set(computed) for part in found)
    assert_no_circle(wiring, found)


def thrown(dice: random.Random) -> tuple[dict[str, str], list[str]]:
    """Some graph, and which of its nodes a delegate takes."""
    names = [f"n{index}" for index in range(dice.randint(6, 14))]
    wiring = {"x": "", "y": ""}
    for index, name in enumerate(names):
        before = ["x", "y", *names[:index]]
        wiring[name] = " ".join(dice.sample(before[-5:], dice.randint(1, 3 if len(before) > 2 else 2)))
    return wiring, [name for name in names if dice.random() < 0.6]


def ways(wiring: Wiring, name: str, taken: Sequence[str]) -> int:
    """The most delegates that any way from an input to a node, this included, has to go through."""

    def walk(at: str, inside: bool) -> int:
        mine = at in taken
        return (mine and not inside) + max((walk(other, mine) for other in wiring[at].split()), default=0)

    return walk(name, False)


def assert_no_circle(wiring: Wiring, parts: Sequence[Sequence[str]]) -> None:
    """With one node in the place of each delegate, all can be computed in some order."""
    whole = {name: f"delegate {index}" for index, part in enumerate(parts) for name in part}
    needs: dict[str, set[str]] = {}
    for name, takes in wiring.items():
        at = whole.get(name, name)
        needs.setdefault(at, set()).update({whole.get(other, other) for other in takes.split()} - {at})
    while needs:
        ready = {name for name, others in needs.items() if not others & set(needs)}
        assert ready, f"these wait for each other: {needs}"
        for name in ready:
            del needs[name]


# ── what is no reason for a delegate ────────────────────────────────────────────────────────────────────────────────


def test_moves_alone_are_left_out() -> None:
    assert cut({"x": "", "m": "x", "n": "m"}, "m", "n", moves="m n") == []


def test_moves_beside_something_computed_are_taken() -> None:
    wiring = {"x": "", "m": "x", "a": "m", "n": "a"}
    assert cut(wiring, "m", "a", "n", moves="m n") == ["m a n"]


def test_moves_of_a_phase_that_touch_nothing_of_it_are_left_out() -> None:
    wiring = {"x": "", "y": "", "a": "x", "m": "y", "n": "m"}
    assert cut(wiring, "a", "m", "n", moves="m n") == ["a"]


def test_without_moves_in_between_what_comes_behind_starts_earlier() -> None:
    """A delegate for `m` alone would put `c` one phase behind `b`."""
    wiring = {"x": "", "a": "x", "p": "a", "m": "p", "q": "m", "c": "q", "r": "a", "b": "r"}
    assert cut(wiring, "a", "b", "c", "m") == ["a", "m b", "c"]
    assert cut(wiring, "a", "b", "c", "m", moves="m") == ["a", "c b"]


def test_moves_that_are_left_out_make_others_lonely() -> None:
    """`m` and `n` are between kernels; so is all that is only there because of them."""
    wiring = {"x": "", "m": "x", "p": "m", "n": "p", "q": "n", "a": "q"}
    assert cut(wiring, "m", "n", "a", moves="m n") == ["a"]


# ── nodes that need each other ──────────────────────────────────────────────────────────────────────────────────────


def test_a_group_waits_for_all_that_it_needs() -> None:
    """The first of the group could be computed at once, its second can't; and what needs the first waits as well."""
    wiring = {"x": "", "a": "x", "p": "a", "g": "x", "h": "p", "c": "g"}
    assert cut(wiring, "a", "g h", "c") == ["a", "g h c"]


def test_groups_that_wait_for_groups() -> None:
    wiring = {"x": "", "a": "x", "p": "a", "g": "x", "h": "p", "q": "g", "i": "x", "j": "q"}
    assert cut(wiring, "a", "i j", "g h") == ["a", "g h", "i j"]


def test_a_group_is_not_left_out_in_part() -> None:
    """Nothing passes between the two, and one of them is no reason for a delegate."""
    assert cut({"x": "", "y": "", "m": "x", "a": "y"}, "m a", moves="m") == ["m a"]
    assert cut({"x": "", "y": "", "m": "x", "n": "y"}, "m n", moves="m n") == []


@pytest.mark.parametrize(
    ("wiring", "groups"),
    [
        ({"x": "", "g": "x", "p": "g", "h": "p"}, ["g h"]),
        ({"x": "", "g": "x", "p": "g", "a": "p", "h": "a"}, ["g h", "a"]),
        (
            {"x": "", "g": "x", "k": "x", "p": "g", "l": "p", "q": "k", "h": "q"},
            ["g h", "k l"],
        ),
    ],
    ids=["kernel", "kernel and delegate", "two groups"],
)
def test_a_group_around_something_else(wiring: Wiring, groups: list[str]) -> None:
    """No order computes them together: that's an error, and no endless search."""
    with pytest.raises(ValueError, match="depend on what it can't compute in between"):
        cut(wiring, *groups)
