"""What makes reading a large graph faster, and that it changes nothing."""

from __future__ import annotations

import gc
import typing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from polyport.errors import ArtifactError
from polyport.patching import Patch
from polyport.testing import check_patch
from polyport_dynamo.archive import load_program
from polyport_dynamo.quicker import PATCHES


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_patch_is_needed_and_works(patch: Patch) -> None:
    check_patch(patch)


def test_same_program_as_torch_reads(saved: Path) -> None:
    ours, theirs = load_program(saved / "model.pt2", trust=False), torch.export.load(str(saved / "model.pt2"))
    assert ours.graph_module.code == theirs.graph_module.code
    assert str(ours.graph_signature) == str(theirs.graph_signature)
    assert str(ours.range_constraints) == str(theirs.range_constraints)
    assert ours._guards_code == theirs._guards_code
    for one, other in zip(ours.graph.nodes, theirs.graph.nodes, strict=True):
        assert str(one.meta.get("val")) == str(other.meta.get("val"))


def test_everything_is_put_back(saved: Path, tmp_path: Path) -> None:
    from torch._export.serde import serialize

    parse = serialize.GraphModuleDeserializer._parse_sym_expr
    (tmp_path / "model.pt2").write_bytes((saved / "model.pt2").read_bytes()[:-1000])
    for path in (saved, tmp_path):
        try:
            load_program(path / "model.pt2", trust=True)
        except ArtifactError:
            assert path == tmp_path
        assert gc.isenabled()
        assert serialize.typing is typing
        assert serialize.GraphModuleDeserializer._parse_sym_expr is parse


def test_a_collector_that_is_off_stays_off(saved: Path) -> None:
    gc.disable()
    try:
        load_program(saved / "model.pt2", trust=False)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_several_at_a_time(saved: Path) -> None:
    """Torch alone refuses: it keeps what it is reading in a global."""
    with ThreadPoolExecutor(4) as pool:
        programs = list(pool.map(lambda _: load_program(saved / "model.pt2", trust=False), range(8)))
    assert len({str(program.graph_module.code) for program in programs}) == 1
