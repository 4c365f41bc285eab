"""The file of a program, in which each weight lies once.

ExecuTorch writes a weight that both a delegate and a kernel of its own read, such as an embedding that is the last layer too, twice:
among the constants of the program, and under a name that the delegate asks for. What has a name may lie anywhere in the file, so it
may be one of the constants.

The layout is that of ExecuTorch's `exir/_serialize/program.fbs`: a flatbuffer, then segments whose offsets it lists.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from flatbuffers import number_types
from flatbuffers.table import Table

#: Constants lie at multiples of this many bytes, as segments do: then any of them may be a segment.
ALIGNMENT = 128

#: ExecuTorch's header, after the first 8 bytes: magic, its length, the flatbuffer's size, where segments start, their size.
_HEADER = struct.Struct("<4sIQQQ")
_HEADER_AT = 8
_MAGIC = b"eh00"

# fields of the tables, in the order of the schema
_PROGRAM_SEGMENTS, _PROGRAM_CONSTANTS, _PROGRAM_NAMED = 4, 5, 7
_SEGMENT_OFFSET, _SEGMENT_SIZE = 0, 1
_CONSTANTS_INDEX, _CONSTANTS_OFFSETS = 0, 1
_NAMED_INDEX = 1


def file_options() -> dict[str, Any]:
    """Options of `executorch.exir.ExecutorchBackendConfig` that say how a file is laid out."""
    return {"extract_delegate_segments": True, "constant_tensor_alignment": ALIGNMENT}


class Pieces(list[bytes]):
    """What would be written to a file: ExecuTorch hands it out piece by piece, each weight one of them."""

    def write(self, piece: bytes) -> None:
        """Take a piece."""
        self.append(piece)


def without_repeats(pieces: Sequence[bytes]) -> Sequence[bytes]:
    """The pieces of a file, less the named weights that lie among the constants.

    Args:
        pieces: As `executorch.exir.ExecutorchProgramManager.write_to_file` writes them; not changed.

    Returns:
        The pieces of a file that means the same.
    """
    layout = _Layout.of(pieces)
    repeats = layout.repeats() if layout else {}
    return layout.without(repeats) if layout and repeats else pieces


@attrs.frozen
class _Segment:
    """Where a segment lies.

    Args:
        offset: Bytes after the start of the segments.
        size: In bytes.
        written: Where in the flatbuffer the offset stands; None for 0, which is left out.
    """

    offset: int
    size: int
    written: int | None


@attrs.frozen
class _Layout:
    """A file, taken apart.

    Args:
        head: The flatbuffer, with the header.
        base: Where segments start.
        data: Offset -> piece that lies there.
        segments: In the order of their offsets.
        constants: Index of the segment with the constants.
        offsets: Where in it each constant is.
        named: Indices of the segments that have names.
    """

    head: bytes
    base: int
    data: Mapping[int, bytes]
    segments: Sequence[_Segment]
    constants: int
    offsets: Sequence[int]
    named: frozenset[int]

    @classmethod
    def of(cls, pieces: Sequence[bytes]) -> _Layout | None:
        """The layout of a file; None for one without constants or without segments."""
        head, *rest = pieces
        if head[_HEADER_AT : _HEADER_AT + len(_MAGIC)] != _MAGIC:
            return None
        _, _, _, base, _ = _HEADER.unpack_from(head, _HEADER_AT)
        program = Table(head, struct.unpack_from("<I", head)[0])
        constants = _table(program, _PROGRAM_CONSTANTS)
        if constants is None:
            return None
        data, position = {}, len(head) - base
        for piece in rest:
            if piece:
                data[position] = piece
            position += len(piece)
        return cls(
            head,
            base,
            data,
            [_segment(one) for one in _tables(program, _PROGRAM_SEGMENTS)],
            _number(constants, _CONSTANTS_INDEX, number_types.Uint32Flags),
            _numbers(constants, _CONSTANTS_OFFSETS),
            frozenset(
                _number(one, _NAMED_INDEX, number_types.Uint32Flags)
                for one in _tables(program, _PROGRAM_NAMED)
            ),
        )

    def repeats(self) -> dict[int, int]:
        """Named segment -> where among the constants the same bytes lie."""
        start = self.segments[self.constants].offset
        by_size: dict[int, list[int]] = {}
        for offset in self.offsets:
            if offset % ALIGNMENT == 0 and (constant := self.data.get(start + offset)) is not None:
                by_size.setdefault(len(constant), []).append(offset)
        found = {}
        for index in self.named:
            segment = self.segments[index]
            piece = self.data.get(segment.offset, b"")
            if segment.written is None or len(piece) != segment.size:
                continue
            equal = [at for at in by_size.get(len(piece), ()) if self.data[start + at] == piece]
            if equal:
                found[index] = equal[0]
        return found

    def without(self, repeats: Mapping[int, int]) -> list[bytes]:
        """The pieces of the file, less some segments.

        Args:
            repeats: See `repeats`.
        """
        placed: dict[int, int] = {}
        body: list[bytes] = []
        end = 0
        for index, segment in enumerate(self.segments):
            if index in repeats:
                continue
            placed[index] = end + -end % _alignment(segment.offset)
            body += [bytes(placed[index] - end), *self._within(segment)]
            end = placed[index] + segment.size
        placed |= {index: placed[self.constants] + offset for index, offset in repeats.items()}
        head = bytearray(self.head)
        magic, length, size, base, _ = _HEADER.unpack_from(head, _HEADER_AT)
        _HEADER.pack_into(head, _HEADER_AT, magic, length, size, base, end)
        for index, segment in enumerate(self.segments):
            if segment.written is not None:
                struct.pack_into("<Q", head, segment.written, placed[index])
        return [bytes(head), bytes(self.base - len(head)), *body]

    def _within(self, segment: _Segment) -> Iterator[bytes]:
        """The pieces of a segment."""
        at = segment.offset
        while at < segment.offset + segment.size:
            yield self.data[at]
            at += len(self.data[at])


def _alignment(offset: int) -> int:
    """What an offset was aligned to, at least; more than a page is chance."""
    return min(offset & -offset or ALIGNMENT, 4096)


# ── reading a flatbuffer ────────────────────────────────────────────────────────────────────────────────────────────


def _segment(table: Any) -> _Segment:
    at = _at(table, _SEGMENT_OFFSET)
    return _Segment(
        _number(table, _SEGMENT_OFFSET, number_types.Uint64Flags),
        _number(table, _SEGMENT_SIZE, number_types.Uint64Flags),
        table.Pos + at if at else None,
    )


def _at(table: Any, field: int) -> int:
    """Where in a table a field is; 0 for one that was left out."""
    return int(table.Offset(4 + 2 * field))


def _number(table: Any, field: int, kind: Any) -> int:
    at = _at(table, field)
    return int(table.Get(kind, table.Pos + at)) if at else 0


def _numbers(table: Any, field: int) -> list[int]:
    at = _at(table, field)
    if not at:
        return []
    start = table.Vector(at)
    return [int(table.Get(number_types.Uint64Flags, start + 8 * i)) for i in range(table.VectorLen(at))]


def _table(table: Any, field: int) -> Any:
    at = _at(table, field)
    return Table(table.Bytes, table.Indirect(table.Pos + at)) if at else None


def _tables(table: Any, field: int) -> list[Any]:
    at = _at(table, field)
    if not at:
        return []
    start = table.Vector(at)
    return [Table(table.Bytes, table.Indirect(start + 4 * i)) for i in range(table.VectorLen(at))]
