"""How fast exports of a language model generate, beside the model itself and bare loops (see `generation.py`)."""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bare_loops
import generation_exports as exports
import models
import openvino_loops
import processes
import torch

TOKENS = 64
#: Our exports that generate here.
GENERATORS = (
    "onnx-multi",
    "onnx-static",
    "onnx-two",
    "dynamo-multi",
    "openvino-multi",
    "openvino-stateless",
)
#: Ours that are driven by a bare loop as well, and the peer's that are compared with them.
LOOPS = {
    "onnx-multi": ("peer-multi", "peer-fused"),
    "onnx-static": ("peer-static",),
    "openvino-multi": ("peer-openvino-multi",),
    "openvino-stateless": ("peer-openvino-stateless",),
}
#: Lengths of the prompts after which the first token is timed.
PROMPTS = (64, 400)

#: Name of a measurement -> the CPU seconds that it took in each round of each process.
Times = dict[str, list[float]]


def measured(
    folder: Path, layers: int, count: int, rounds: int, formats: Sequence[str] = exports.FORMATS
) -> dict[str, Times]:
    """All measurements: `decode` for 64 tokens, and `first 64` and `first 400` for one token.

    Where a session's weights come to lie in memory makes a tenth of difference, so several processes are measured, each of
    which loads the contenders in another order.

    Args:
        folder: Where the exports are.
        layers: How many layers they have; 0 for all.
        count: How many processes.
        rounds: How often each of them measures everything.
        formats: Whose exports take part.
    """
    found: dict[str, Times] = {}
    for turn in range(count):
        arguments = (str(folder), str(layers), str(rounds), str(turn), ",".join(formats))
        for question, times in processes.measure(Path(__file__), *arguments).items():
            known = found.setdefault(question, {name: [] for name in times})
            for name, spent in times.items():
                known[name] += spent
    return found


def _ratio(times: Times, one: str, other: str) -> str:
    """The median of what the rounds say: what disturbs one round disturbs both of its measurements."""
    return f"{statistics.median(a / b for a, b in zip(times[one], times[other], strict=True)):.2f}"


def tables(found: dict[str, Times]) -> dict[str, str]:
    """Title -> table."""
    decode = found["decode"]
    return {
        "Generating": _generating(decode),
        "The loop": _loop(decode),
        "The graph": _graph(decode),
        "First token": _first(found),
    }


def _generating(times: Times) -> str:
    rows = []
    for name in _ways(times):
        speed = f"{TOKENS / min(times[name]):.1f}"
        rows.append([name.removeprefix("generate "), speed, _ratio(times, "eager", name)])
    return processes.table(["way", "tokens/s", "over eager"], rows)


def _ways(times: Times) -> list[str]:
    """The model, and our exports that generated."""
    return [name for name in ("eager", *(f"generate {name}" for name in GENERATORS)) if name in times]


def _loop(times: Times) -> str:
    rows = []
    for name in LOOPS:
        pair = f"generate {name}", f"bare {name}"
        if pair[0] not in times:
            continue
        rows.append([name, *(_per_token(times[key]) for key in pair), _ratio(times, *pair)])
    return processes.table(["way", "generate, ms/token", "bare loop, ms/token", "generate / bare"], rows)


def _graph(times: Times) -> str:
    rows = []
    for names in ((ours, peer) for ours, peers in LOOPS.items() for peer in peers):
        keys = [f"bare {name}" for name in names]
        if keys[0] not in times:
            continue
        rows.append([*names, *(_per_token(times[key]) for key in keys), _ratio(times, *keys)])
    return processes.table(
        ["our graph", "peer's graph", "ours, ms/token", "peer's, ms/token", "ours / peer"], rows, words=2
    )


def _per_token(times: list[float]) -> str:
    return f"{1000 * min(times) / TOKENS:.2f}"


def _first(found: dict[str, Times]) -> str:
    order = _ways(found["decode"])
    order += [name for name in found["decode"] if name.startswith("bare ")]
    rows = []
    for name in order:
        row = [name]
        for length in PROMPTS:
            times = found[f"first {length}"]
            row += [f"{1000 * min(times[name]):.0f}", _ratio(times, name, "eager")]
        rows.append(row)
    head = ["way"]
    for length in PROMPTS:
        head += [f"{length} tokens, ms", "over eager"]
    return processes.table(head, rows)


# ── in the process that measures ────────────────────────────────────────────────────────────────────────────────────


def _work(folder: Path, layers: int, rounds: int, turn: int, formats: Sequence[str]) -> dict[str, Times]:
    torch.set_num_threads(1)
    model, tokenizer = models.language_model(exports.source(folder), layers)
    generators: dict[str, Any] = {"eager": model}
    loops: dict[str, Any] = {}
    ours = [name for name in GENERATORS if exports.format_of(name) in formats]
    names = ours + [name for name in exports.PEER if exports.format_of(name) in formats]
    first = turn * len(ours) % len(names)  # ours before the peer's, and the other way round
    for name in [*names[first:], *names[:first]]:
        target = folder / f"{name}-{layers}"
        loaded = None
        if name not in exports.PEER:
            loaded = generators[f"generate {name}"] = exports.loaded(target, name)
        if name in exports.PEER or name in LOOPS:
            loops[f"bare {name}"] = _loop_of(name, target, loaded)
    prompts = {"decode": dict(tokenizer(exports.PROMPT, return_tensors="pt"))}
    for length in PROMPTS:
        prompts[f"first {length}"] = dict(
            tokenizer(exports.LONG_TEXT, return_tensors="pt", truncation=True, max_length=length)
        )
    return {
        question: _timed(_calls(generators, loops, prompt, TOKENS if question == "decode" else 1), rounds)
        for question, prompt in prompts.items()
    }


def _loop_of(name: str, folder: Path, loaded: Any) -> Any:
    """A bare loop: over the session of our ONNX export, or over the file."""
    if exports.format_of(name) == "openvino":
        return openvino_loops.loop(openvino_loops.graph(folder))
    if loaded is not None:
        session = loaded.caller("decode").runner.session
    else:
        session = bare_loops.session(str(folder / "model.onnx"))
    if name.endswith("static"):
        return bare_loops.Static(session, exports.ROOM)
    return bare_loops.Growing(session)


def _calls(
    generators: dict[str, Any], loops: dict[str, Any], prompt: dict[str, Any], count: int
) -> dict[str, Callable[[], list[int]]]:
    def generated(model: Any) -> list[int]:
        ids = model.generate(**prompt, max_new_tokens=count, do_sample=False)
        made: list[int] = ids[0, prompt["input_ids"].shape[1] :].tolist()
        return made

    calls: dict[str, Callable[[], list[int]]] = {
        name: functools.partial(generated, model) for name, model in generators.items()
    }
    ids = prompt["input_ids"].numpy()
    calls |= {name: functools.partial(loop, ids, count) for name, loop in loops.items()}
    return dict(
        sorted(calls.items(), key=lambda item: item[0].split()[-1])
    )  # what is compared, one after another


def _timed(calls: dict[str, Callable[[], list[int]]], rounds: int) -> Times:
    wanted = calls["eager"]()
    times: Times = {name: [] for name in calls}
    for name, call in calls.items():
        if (made := call()) != wanted:  # the first call also makes sessions
            print(f"{name} makes other tokens than eager: {made}, not {wanted}", file=sys.stderr)
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name].append(time.process_time() - start)
    return times


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--worker", nargs=5, metavar=("FOLDER", "LAYERS", "ROUNDS", "TURN", "FORMATS"), required=True
    )
    folder, *numbers, formats = parser.parse_args().worker
    print(json.dumps(_work(Path(folder), *map(int, numbers), formats.split(","))))
