"""Outputs of which there are as many as an axis is long."""

from __future__ import annotations

import pytest
import torch

from polyport import structure
from polyport.errors import ArtifactError
from polyport.pieces import cutter, find_pieces


def test_found_and_cut_again() -> None:
    traced = {"logits": torch.empty(0), "images": (torch.empty(0),), "rest": [torch.empty(0)]}
    wanted = {
        "logits": torch.rand(2, 3),
        "images": tuple(torch.rand(4, 8) for _ in range(5)),
        "rest": [torch.rand(2)],
    }
    pieces = find_pieces(traced, wanted, {"batch": 2, "images": 5})
    assert pieces == {1: "images"}
    _, spec = structure.flatten(traced)
    for count in (1, 3):
        packed = torch.rand(4 * count, 8)
        found = cutter(pieces, spec)([torch.rand(2, 3), packed, torch.rand(2)], {"batch": 2, "images": count})
        assert [x.shape for x in found["images"]] == [(4, 8)] * count
        assert torch.cat(found["images"]).equal(packed)
        assert isinstance(found["images"], tuple)
        assert isinstance(found["rest"], list)


@pytest.mark.parametrize(
    ("wanted", "sizes"),
    [
        ({"images": (torch.rand(4, 8),)}, {"images": 1}),  # as many as there are
        ({"images": tuple(torch.rand(n, 8) for n in (3, 4))}, {"images": 2}),  # pieces of different lengths
        ({"images": (torch.rand(4, 8),) * 3}, {"images": 2}),  # counted by nothing that is known
        ({"other": (torch.rand(4, 8),) * 2}, {"images": 2}),
    ],
)
def test_nothing_to_cut(wanted: object, sizes: dict[str, int]) -> None:
    assert find_pieces({"images": (torch.empty(0),)}, wanted, sizes) == {}


def test_place_that_holds_no_pieces_is_refused() -> None:
    _, spec = structure.flatten({"logits": torch.empty(0)})
    with pytest.raises(ArtifactError, match="which have no place"):
        cutter({0: "images"}, spec)
