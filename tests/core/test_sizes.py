"""Sizes that follow from the sizes of the inputs."""

from __future__ import annotations

import pytest

from polyport.errors import ArtifactError
from polyport.sizes import compiled


@pytest.mark.parametrize(
    ("expression", "size"),
    [
        ("sequence", 7),
        ("past+sequence", 12),
        ("2*batch-1", 5),
        ("Max(sequence,9)", 9),
        ("Min(sequence,9)//2", 3),
        ("FloorDiv(sequence,2)+Mod(sequence,4)", 6),
        ("-1+batch", 2),
        (4, 4),
    ],
)
def test_value(expression: object, size: int) -> None:
    assert compiled(expression)({"batch": 3, "sequence": 7, "past": 5}) == size


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')",
        "batch.real",
        "batch[0]",
        "open(1)",
        "batch if 1 else 2",
        "1.5",
        "'x'",
        "",
        "Max()",
        "a**99",
        "(" * 500,
    ],
)
def test_anything_else_is_refused(expression: str) -> None:
    with pytest.raises(ArtifactError, match="is no size"):
        compiled(expression)
