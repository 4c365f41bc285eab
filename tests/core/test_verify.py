"""Which inputs an export is compared on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyport.errors import InputError
from polyport.generation.proof import compare_answers
from polyport.metadata import AxisRange, ExportMetadata, TensorInfo
from polyport.verify import verify

NAMES = ("input_ids", "attention_mask")


class Limited:
    """An export of a model for which some sizes are too large or too small."""

    generation = None
    sample = None

    def __init__(self, model: Any, **axes: AxisRange) -> None:
        self.model = model
        inputs = tuple(TensorInfo(name, "int64", ("batch", "sequence")) for name in NAMES)
        self.metadata = ExportMetadata(inputs=inputs, axes=axes)

    def _only(self) -> Any:
        return SimpleNamespace(metadata=self.metadata)

    def __call__(self, **kwargs: Any) -> Any:
        for name, size in zip(("batch", "sequence"), kwargs["input_ids"].shape, strict=True):
            span = self.metadata.axes[name]
            if size < span.min or (span.max is not None and size > span.max):
                raise InputError(f"The axis {name!r} has size {size}.")
        with torch.no_grad():
            return self.model(**kwargs)


def sizes(report: Any) -> dict[str, tuple[int, int]]:
    return {case.name: (case.sizes["batch"], case.sizes["sequence"]) for case in report.cases}


def test_without_limits(tiny_bert: Any, token_ids: Any) -> None:
    report = verify(Limited(tiny_bert, batch=AxisRange(), sequence=AxisRange()), tiny_bert, token_ids(2, 6))
    assert report.passed
    assert sizes(report) == {
        "sample": (2, 6),
        "batch x3": (6, 6),
        "sequence shorter": (2, 3),
        "sequence longer": (4, 15),
        "batch 1": (1, 6),
        "left padding": (4, 6),
        "right padding": (4, 6),
    }


@pytest.mark.parametrize(
    ("batch", "sequence", "expected"),
    [
        ((1, 5), (1, 9), {"batch x2": (4, 6), "sequence shorter": (2, 3), "sequence longer": (4, 9), "batch 1": (1, 6), "left padding": (4, 6)}),
        ((2, 3), (4, 6), {"sequence shorter": (2, 4), "left padding": (2, 6)}),
        ((2, 2), (6, 6), {"left padding": (2, 6)}),
        ((1, None), (1, 7), {"batch x3": (6, 6), "sequence shorter": (2, 3), "sequence longer": (4, 7), "batch 1": (1, 6), "left padding": (4, 6)}),
    ],
)  # fmt: skip
def test_within_the_limits(
    tiny_bert: Any, token_ids: Any, batch: Any, sequence: Any, expected: dict[str, tuple[int, int]]
) -> None:
    """Sizes that the record rules out prove nothing; those at its limits do."""
    exported = Limited(tiny_bert, batch=AxisRange(*batch), sequence=AxisRange(*sequence))
    report = verify(exported, tiny_bert, token_ids(2, 6))
    assert report.passed, report
    assert sizes(report) == {
        "sample": (2, 6),
        **expected,
        "right padding": expected["left padding"],
    }


@pytest.mark.parametrize(
    ("most", "names"), [(1, ["answer"]), (2, ["answer", "left padding"]), (None, ["answer", "left padding"])]
)
def test_answers_of_one_row(tiny_llama: Any, token_ids: Any, most: int | None, names: list[str]) -> None:
    metadata = ExportMetadata(axes={"batch": AxisRange(1, most)})
    exported = SimpleNamespace(
        generate=tiny_llama.generate, components={"decode": SimpleNamespace(metadata=metadata)}
    )
    report = compare_answers(tiny_llama, exported, token_ids(1, 7))
    assert report.passed
    assert [case.name for case in report.cases] == names
