"""From the tensors that a graph returns to what the model returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.utils import ModelOutput

from polyport import structure
from polyport.errors import ArtifactError
from polyport.metadata import ExportMetadata
from polyport.pieces import cutter
from polyport.sizes import compiled
from polyport.structure import TreeSpec


class Results:
    """The results of one component, put together.

    Args:
        metadata: The record of the component.

    Raises:
        ArtifactError: The record contradicts itself.
    """

    def __init__(self, metadata: ExportMetadata) -> None:
        self.names = metadata.output_names
        self.spec = None if metadata.out_spec is None else structure.load_structure(metadata.out_spec)
        self._constants: dict[int, Any] = {}
        self._follows: dict[int, Callable[[Mapping[str, int]], int]] = {}
        self._cut: Callable[[Any, Mapping[str, int]], Any] | None = None
        if self.spec is None:
            return
        constants, count = metadata.constant_outputs(), self.spec.num_leaves
        if not constants.keys() <= set(range(count)) or count != len(metadata.outputs) + len(constants):
            raise ArtifactError(
                f"The export records {len(metadata.outputs)} outputs and {len(constants)} constants for the {count} "
                "values that the model returns.",
                stage="load",
            )
        if unknown := [name for _, name in metadata.out_pieces if name not in metadata.axes]:
            raise ArtifactError(
                f"The export counts pieces by {unknown[0]!r}, which is no axis.", stage="load"
            )
        # a number that follows from the inputs, such as how much a cache has seen, is recorded as `{"size": expression}`
        self._follows = {
            i: compiled(x["size"]) for i, x in constants.items() if isinstance(x, dict) and "size" in x
        }
        self._constants = {i: x for i, x in constants.items() if i not in self._follows}
        if metadata.out_pieces:
            self._cut = cutter(dict(metadata.out_pieces), self.spec)

    def leaves(self, tensors: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> list[Any]:
        """The leaves of the structure: the tensors, with numbers in the places where there are some.

        Args:
            tensors: What the graph returned.
            sizes: Sizes of the named axes in the call.
        """
        if not self._constants and not self._follows:
            return list(tensors)
        flat = iter(tensors)
        fixed = {**self._constants, **{i: size(sizes) for i, size in self._follows.items()}}
        count = len(self.names) + len(fixed)
        return [fixed[i] if i in fixed else next(flat) for i in range(count)]

    def value(self, tensors: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> Any:
        """What the model returns.

        Args:
            tensors: What the graph returned.
            sizes: Sizes of the named axes in the call.
        """
        if self.spec is None:
            return dict(zip(self.names, tensors, strict=True))
        leaves = self.leaves(tensors, sizes)
        if self._cut is not None:
            return self._cut(leaves, sizes)
        cls, spec = self.spec.type, self.spec
        if cls is not None and issubclass(cls, ModelOutput) and all(x.is_leaf() for x in spec.children()):
            # by far the most frequent case, without torch's general machinery
            return cls(**dict(zip(spec.context, leaves, strict=True)))
        return structure.unflatten(leaves, spec)

    def parts(self, leaves: Sequence[Any]) -> dict[str, tuple[TreeSpec, list[Any]]]:
        """Field of the output -> (its structure, its leaves), for outputs with named fields.

        Args:
            leaves: See `leaves`.
        """
        found: dict[str, tuple[TreeSpec, list[Any]]] = {}
        if self.spec is None:
            return found
        start = 0
        for key, child in zip(self.spec.context, self.spec.children(), strict=True):
            found[key] = (child, list(leaves[start : start + child.num_leaves]))
            start += child.num_leaves
        return found
