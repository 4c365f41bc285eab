"""Whether an input's memory may take the output that is its new content.

ONNX knows no memory: an input and an output may be one buffer only if nothing reads the old content once the new one is being
written. Nodes run in any order that their data allows, so every other reader must come before the writer by its data.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

#: Operators whose result a runtime may leave in the memory of their input, or drop where they have no effect.
_VIEWS = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Cast", "Dropout", "Expand", "Pad", "Slice",
                    "Tile", "Transpose"})  # fmt: skip

#: Writers that may read the old content where they write, by the inputs through which they may: they change some elements
#: and copy no others when both are one memory, or read every element before they write it.
_IN_PLACE = {"ScatterND": (0,), "ScatterElements": (0,), "TensorScatter": (0,), "Add": (0, 1), "Sub": (0, 1), "Mul": (0, 1),
             "Div": (0, 1), "Max": (0, 1), "Min": (0, 1)}  # fmt: skip


def may_overwrite(result: ir.Value, source: ir.Value) -> bool:
    """Whether an output may be written where an input of the same shape and type lies.

    Args:
        result: the output.
        source: the input.
    """
    writer = result.producer()
    if writer is None or writer.graph is not source.graph:
        return False
    others = []
    for node, index in _readers(source):
        if node is not writer:
            others.append(node)
        elif index not in _IN_PLACE.get(writer.op_type, ()) or writer.domain:
            return False
    return not others or set(others) <= _before(writer)


def _readers(source: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """Nodes that read a value, or what may be the same memory, with the index of the input through which they do."""
    waiting, seen = [source], {source}
    while waiting:
        for node, index in waiting.pop().uses():
            yield node, index
            if node.op_type in _VIEWS and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                waiting.append(node.outputs[0])


def _before(node: ir.Node) -> set[ir.Node]:
    """The nodes that a node's inputs are computed by. Those inside branches and loops are not among them."""
    found: set[ir.Node] = set()
    waiting = [node]
    while waiting:
        for value in waiting.pop().inputs:
            producer = value.producer() if value is not None else None
            if producer is not None and producer not in found:
                found.add(producer)
                waiting.append(producer)
    return found
