"""The list of what OpenVINO's PyTorch frontend translates, held against the frontend."""

from __future__ import annotations

import re
from pathlib import Path

import openvino as ov
import pytest
import torch
from lowered import check

from polyport_openvino import ops
from polyport_openvino.frontend import OPERATORS


@pytest.fixture(scope="module")
def library() -> bytes:
    """The frontend as it is built. It has no call that tells what it translates, but the names are in its table."""
    (path,) = (Path(ov.__file__).parent / "libs").glob("libopenvino_pytorch_frontend*")
    return path.read_bytes()


def test_the_frontend_has_every_operator_of_the_list(library: bytes) -> None:
    assert not [name for name in sorted(OPERATORS) if f"{name}\0".encode() not in library]


def test_every_operator_of_the_list_is_one_of_torch() -> None:
    """Those of libraries that may not be imported are left out."""
    names = [name.split(".") for name in sorted(OPERATORS) if name.startswith("aten.")]
    assert not [name for name in names if name[2] not in getattr(torch.ops.aten, name[1]).overloads()]


def _writes(name: str) -> bool:
    schema = getattr(getattr(torch.ops.aten, name.split(".")[1]), name.split(".")[2])._schema
    return bool(schema.is_mutable)


def _exists(name: str) -> bool:
    packet = getattr(torch.ops.aten, name.split(".")[1], None)
    return packet is not None and name.split(".")[2] in packet.overloads()


def test_nothing_that_the_frontend_translates_is_missing(library: bytes) -> None:
    """Graphs are functional: what writes in place never reaches a backend. Random numbers are drawn by ours, or not at all."""
    held = {name.decode() for name in re.findall(rb"aten\.\w+\.\w+(?=\0)", library)}
    functional = {name for name in held if _exists(name) and not _writes(name)} - {"aten.bernoulli.p"}
    ours = {
        name
        for name in functional
        if ops.has(getattr(getattr(torch.ops.aten, name.split(".")[1]), name.split(".")[2]))
    }
    assert functional - ours == {name for name in OPERATORS if name.startswith("aten.")} - ours
    assert not [name for name in OPERATORS if name.startswith("aten.") and _writes(name)]


def test_an_operator_that_is_left_to_the_frontend() -> None:
    check(
        lambda x: torch.nn.functional.hardswish(x),
        [torch.randn(2, 3)],
        [[torch.randn(4, 3)]],
        atol=1e-5,
        rtol=1e-5,
    )
