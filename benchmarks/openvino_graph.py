"""What a compiled OpenVINO model consists of.

    python benchmarks/openvino_graph.py MODEL.xml [MODEL.xml ...]

prints how many operators of each kind the CPU executes for these models. Attention that is fused is one
`ScaledDotProductAttention` for each layer; two `MatMul` and a `Softmax`, or a `Subgraph`, tell that it wasn't recognised, and a
`Broadcast` for each of its inputs that keys and values are repeated for every head of the queries.
"""

from __future__ import annotations

import argparse
import collections
from pathlib import Path
from typing import Any

import openvino_loops
import processes

#: What tells how attention is computed; other kinds follow by their number.
_TELLING = ("ScaledDotProductAttention", "MemoryInput", "Broadcast", "Tile", "MatMul", "Softmax", "Subgraph")
#: Constants cost nothing.
_FREE = ("Const", "Input", "Output")


def kinds(path: Path) -> dict[str, int]:
    """How many operators of each kind the CPU executes.

    Args:
        path: The model's file.
    """
    executed = openvino_loops.compiled(path).get_runtime_model().get_ops()
    found = collections.Counter(_text(node.get_rt_info()["layerType"]) for node in executed)
    return {kind: count for kind, count in found.most_common() if kind not in _FREE}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value.astype(str))


def table(found: dict[str, dict[str, int]]) -> str:
    """Kinds of operators beside each other.

    Args:
        found: Name of a model -> what `kinds` says of it.
    """
    total = collections.Counter[str]()
    for counts in found.values():
        total.update(counts)
    order = [kind for kind in _TELLING if total[kind]]
    order += [kind for kind, _ in total.most_common() if kind not in order]
    rows = [[kind, *(str(counts.get(kind, 0)) for counts in found.values())] for kind in order]
    rows.append(["all", *(str(sum(counts.values())) for counts in found.values())])
    return processes.table(["operator", *found], rows)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL.xml")
    options = parser.parse_args()
    print(table({str(path): kinds(path) for path in options.models}))


if __name__ == "__main__":
    main()
