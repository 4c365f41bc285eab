"""Which port of a model is which leaf of a record."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from polyport.errors import ArtifactError


def in_order(ports: Sequence[Any], ours: Sequence[str], recorded: Sequence[str], verb: str) -> list[int]:
    """Indices of a model's ports, in the order of the export's record: by name where the names agree, else by order.

    Args:
        ports: The inputs or outputs of the model.
        ours: Names that we give to what is recorded.
        recorded: Names of the leaves.
        verb: Whether the model `takes` or `returns` them, for the message.

    Raises:
        ArtifactError: The model has another number of them.
    """
    names: list[Collection[str]] = [port.get_names() for port in ports]
    if len(names) != len(ours):
        there = ", ".join(min(found, default="(unnamed)") for found in names)
        raise ArtifactError(
            f"The graph {verb} {there}, the export's metadata names {', '.join(recorded)}.",
            stage="load",
            backend="openvino",
        )
    places = {name: index for index, found in enumerate(names) for name in found}
    for wanted in (ours, recorded):
        if set(wanted) <= places.keys():
            found = [places[name] for name in wanted]
            if len(set(found)) == len(found):
                return found
    return list(range(len(ours)))  # another tool's names, in the same order
