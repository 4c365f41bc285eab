"""A traced program as a functional graph of operators that a backend knows."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch

from polyport_dynamo.lowering import internals, signature
from polyport_dynamo.lowering.decompose import decompose, remove_dead
from polyport_dynamo.lowering.functionalize import NotLocal, functionalize
from polyport_dynamo.lowering.leaves import Leaves

logger = logging.getLogger(__name__)

Node = torch.fx.Node


class Operators(Protocol):
    """What a backend has translations for."""

    def known(self, node: Node) -> bool:
        """Whether a `call_function` node has a translation."""
        ...

    def translates(self, target: Any) -> bool:
        """Whether an operator has a translation, for some of its uses at least."""
        ...


@attrs.frozen(eq=False)
class Prepared:
    """A program that is ready to be translated, node by node.

    Args:
        program: The program that the graph belongs to; the traced one, unless all of it had to be decomposed.
        graph: Functional, without dead nodes. Behind the program's results come the final contents of changed inputs.
        changed: Placeholder name of what the program changes: user inputs with the node of their final content, buffers with
            None.
    """

    program: torch.export.ExportedProgram
    graph: torch.fx.Graph
    changed: Mapping[str, Node | None]

    @functools.cached_property
    def placeholders(self) -> dict[str, Node]:
        """The placeholders by their names in the program."""
        return signature.placeholders_of(self.program, self.graph)

    @functools.cached_property
    def inputs(self) -> list[Node]:
        """The placeholders of the tensors that a caller passes."""
        return [self.placeholders[name] for name in signature.user_inputs(self.program)]

    @functools.cached_property
    def contents(self) -> dict[int, Node]:
        """Index of an input that the program changes -> the node of its final content."""
        names = enumerate(signature.user_inputs(self.program))
        return {index: node for index, name in names if (node := self.changed.get(name)) is not None}

    @functools.cached_property
    def results(self) -> list[Node]:
        """The nodes whose values a caller gets as tensors."""
        return signature.results(self.program, self.graph)

    def leaves(
        self, input_names: Sequence[str], output_names: Sequence[str], value: Callable[[Node], Any]
    ) -> Leaves:
        """How the leaves of a call meet the graph.

        Args:
            input_names: One per input.
            output_names: One per result.
            value: Node -> what nodes of equal values have in common (see `signature.passed_through`).
        """
        passed = signature.passed_through(self.results, self.inputs, self.contents, value)
        return Leaves(
            inputs=tuple(input_names),
            outputs=tuple(output_names),
            in_place=tuple(input_names[i] for i in self.contents),
            passed_through={output_names[i]: input_names[source] for i, source in passed.items()},
        )

    def computed(self, leaves: Leaves) -> list[Node]:
        """The results that are outputs of the graph (see `Leaves.computed`)."""
        named = zip(self.results, leaves.outputs, strict=True)
        return [result for result, name in named if name not in leaves.passed_through]


def prepare(program: torch.export.ExportedProgram, operators: Operators) -> Prepared:
    """Make a graph functional, and decompose what has no translation, one operator at a time.

    `ExportedProgram.run_decompositions` runs the whole program again over fake tensors, which takes longer than all else that
    a lowering does. It is the way back where the local one is not provably right.

    Args:
        program: As `torch.export.export` returns it; not changed.
        operators: What needs no decomposition. Operators with neither stay in the graph.

    Raises:
        ValueError: The results depend on a buffer that the program changes: no call may depend on earlier ones.
    """
    graph = copy.deepcopy(program.graph)
    try:
        names = {copied: name for name, copied in signature.placeholders_of(program, graph).items()}
        changed = {names[node]: content for node, content in functionalize(graph).items()}
        inputs = _expand(program, graph, operators, changed)
    except NotLocal as reason:
        logger.info("decomposing the whole program, since %s", reason)
        program = _decompose_whole(program, operators)
        graph = copy.deepcopy(program.graph)
        changed = signature.mutated_inputs(program, graph)
        inputs = _expand(program, graph, operators, changed)
    prepared = Prepared(
        program, graph, {name: inputs.get(name) for name in [*changed, *_changed_buffers(program)]}
    )
    _refuse_state(prepared)
    return prepared


def _expand(
    program: torch.export.ExportedProgram,
    graph: torch.fx.Graph,
    operators: Operators,
    changed: Mapping[str, Node],
) -> dict[str, Node]:
    """Decompose what has no translation; the final contents of user inputs are returned and stay in the graph."""
    inputs = [name for name in signature.user_inputs(program) if name in changed]
    signature.keep(graph, [changed[name] for name in inputs])
    remove_dead(graph)
    decompose(graph, operators.known)
    remove_dead(graph)
    return dict(zip(inputs, signature.kept(program, graph), strict=True))


def _changed_buffers(program: torch.export.ExportedProgram) -> list[str]:
    """Placeholders of the buffers that a functional program says it changes."""
    declared = program.graph_signature
    changed = set(declared.buffers_to_mutate.values())
    return [name for name, target in declared.inputs_to_buffers.items() if target in changed]


def _decompose_whole(
    program: torch.export.ExportedProgram, operators: Operators
) -> torch.export.ExportedProgram:
    """Torch's own pass over the whole program, for operators that have no translation."""
    table = {
        target: function
        for target, function in internals.default_decompositions().items()
        if not operators.translates(target)
    }
    whole: torch.export.ExportedProgram = program.run_decompositions(table)
    return whole


def _refuse_state(prepared: Prepared) -> None:
    """Refuse a program whose calls depend on earlier ones.

    A buffer that is changed but has no part in the results (a counter of batches) may change unseen.

    Raises:
        ValueError: a buffer that the results depend on is changed in place.
    """
    buffers = [name for name, content in prepared.changed.items() if content is None]
    if not buffers:
        return
    reached: set[Node] = set()
    waiting = [*prepared.results, *prepared.contents.values()]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting.extend(node.all_input_nodes)
    specs = prepared.program.graph_signature.input_specs
    targets = {spec.arg.name: spec.target for spec in specs if hasattr(spec.arg, "name")}
    for name in buffers:
        if prepared.placeholders[name] in reached:
            raise ValueError(
                f"the results depend on the buffer {targets[name]}, which the program changes in place"
            )
