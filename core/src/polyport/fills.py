"""What stands for an input that a call leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from polyport.errors import ArtifactError
from polyport.sizes import compiled

#: Rules that name another input, which has the shape -> the value.
_LIKE = {"ones_like": 1, "zeros_like": 0}


@attrs.frozen
class Fill:
    """One rule of `ExportMetadata.defaults`, read.

    Args:
        value: What the input is filled with.
        like: The input whose shape it has; empty where `shape` says it.
        shape: Sizes of the axes, given the sizes of the named ones.
        counts: Whether it is filled with 0, 1, 2... in place of `value`.
    """

    value: int
    like: str = ""
    shape: tuple[Callable[[Mapping[str, int]], int], ...] = ()
    counts: bool = False

    @classmethod
    def read(cls, rule: str) -> Fill:
        """`ones_like:input_ids`, `zeros_like:input_ids`, `ones:batch,past+sequence` or `arange:sequence`.

        Raises:
            ArtifactError: It is anything else.
        """
        kind, _, source = rule.partition(":")
        if source and kind in _LIKE:
            return cls(_LIKE[kind], like=source)
        if source and kind in ("ones", "arange") and "(" not in source:
            return cls(1, shape=tuple(map(compiled, source.split(","))), counts=kind == "arange")
        raise ArtifactError(
            f"The export fills a missing input by the rule {rule!r}, which is unknown.", stage="load"
        )
