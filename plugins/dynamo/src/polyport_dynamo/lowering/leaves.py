"""How the leaves of a record meet the inputs and outputs of its graph.

Most leaves are an input or an output of the graph under their own name. The others are those that a call hands on: a cache
that is written to where it lies, a cache that is only read and comes back, a mask that is returned as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import attrs

from polyport.errors import ArtifactError
from polyport.metadata import ExportMetadata

#: Key of `ExportMetadata.backend` (see `Leaves.passed_through`).
PASSED_THROUGH = "passed_through"


@attrs.frozen(kw_only=True)
class Leaves:
    """The leaves of one graph.

    Args:
        inputs: Leaves that go in, in the graph's order.
        outputs: Leaves that the model returns, in its order.
        in_place: Inputs that a call changes. Their final content is an output of the graph.
        passed_through: Outputs that are an input's own tensor, changed or not: output leaf -> input leaf. They are no
            outputs of the graph.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    in_place: tuple[str, ...] = ()
    passed_through: Mapping[str, str] = attrs.field(factory=dict)

    @classmethod
    def of(cls, metadata: ExportMetadata) -> Leaves:
        """The leaves as a record describes them; other tools record neither changed nor passed inputs.

        Raises:
            ArtifactError: The record is damaged.
        """
        inputs, outputs = metadata.input_names, metadata.output_names
        in_place = metadata.in_place
        passed = metadata.backend.get(PASSED_THROUGH, {})
        if not _known(in_place, inputs):
            raise _damaged("in_place", in_place)
        if (
            not isinstance(passed, dict)
            or not _known(passed, outputs)
            or not _known(passed.values(), inputs, repeated=True)
        ):
            raise _damaged(PASSED_THROUGH, passed)
        return cls(inputs=inputs, outputs=outputs, in_place=in_place, passed_through=passed)

    def without(self, names: Collection[str]) -> Leaves:
        """The leaves of a program that keeps some of them to itself between calls.

        Args:
            names: Those that it keeps; they stay inputs and outputs of the model.
        """
        return attrs.evolve(
            self,
            in_place=tuple(name for name in self.in_place if name not in names),
            passed_through={
                name: source for name, source in self.passed_through.items() if name not in names
            },
        )

    def recorded(self, metadata: ExportMetadata) -> ExportMetadata:
        """A record with what it says of them."""
        passed = {PASSED_THROUGH: dict(self.passed_through)} if self.passed_through else {}
        return attrs.evolve(metadata, in_place=self.in_place, backend={**metadata.backend, **passed})

    @property
    def computed(self) -> tuple[str, ...]:
        """Outputs that the graph has of its own."""
        return tuple(name for name in self.outputs if name not in self.passed_through)

    def graph_names(self) -> tuple[list[str], list[str]]:
        """Names of the graph's inputs and outputs: those of the leaves, the changed inputs after what is computed.

        A graph can't have an input and an output of one name, so a leaf that goes in and comes out is `input.<name>` on one
        side and `output.<name>` on the other.
        """
        both = set(self.inputs) & {*self.computed, *self.in_place}
        inputs = [f"input.{name}" if name in both else name for name in self.inputs]
        outputs = [f"output.{name}" if name in both else name for name in self.computed]
        for name in self.in_place:
            if name in self.computed:  # what the model returns under this name is something else
                outputs[self.computed.index(name)] = f"returned.{name}"
        return inputs, [*outputs, *(f"output.{name}" for name in self.in_place)]


def _known(names: Iterable[Any], leaves: tuple[str, ...], *, repeated: bool = False) -> bool:
    found = list(names)
    known = all(isinstance(name, str) for name in found) and set(found) <= set(leaves)
    return known and (repeated or len(set(found)) == len(found))


def _damaged(key: str, value: Any) -> ArtifactError:
    return ArtifactError(
        f"The export records {key!r} as {value!r}, which does not fit its inputs and outputs.",
        stage="load",
    )
