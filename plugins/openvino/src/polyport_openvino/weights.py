"""The weights of several graphs in one file, every content once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO
from xml.etree import ElementTree

from polyport_openvino.ir import constants

#: Offsets of weights, and of those above a size (in bytes): memory that is mapped is then aligned for vectors, and to pages.
_ALIGNMENT, _PAGE, _LARGE = 64, 4096, 2**20


def merge_weights(documents: Mapping[Path, ElementTree.Element], target: Path) -> None:
    """Write the weights of several graphs to one file. One weight at a time is in memory.

    Args:
        documents: File with the weights of a graph -> its document, which afterwards refers to `target`. The files are removed.
        target: The file that is written.
    """
    places: dict[bytes, int] = {}
    with target.open("wb") as file:
        for source, root in documents.items():
            _append(source, root, file, places)
            source.unlink()


def _append(source: Path, root: ElementTree.Element, file: BinaryIO, places: dict[bytes, int]) -> None:
    moved: dict[tuple[int, int], int] = {}
    with source.open("rb") as weights:
        for data in constants(root):
            offset, size = int(data.get("offset", 0)), int(data.get("size", 0))
            if (offset, size) not in moved:
                weights.seek(offset)
                content = weights.read(size)
                key = hashlib.sha256(content).digest()
                if key not in places:
                    file.write(bytes(-file.tell() % (_PAGE if size > _LARGE else _ALIGNMENT)))
                    places[key] = file.tell()
                    file.write(content)
                moved[offset, size] = places[key]
            data.set("offset", str(moved[offset, size]))
