"""How fast exports of a language model generate, beside the model itself and bare loops (see `generation.py`)."""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bare_loops
import generation_exports as exports
import models
import processes
import torch

TOKENS = 64
#: Our exports that generate here.
GENERATORS = ("onnx-multi", "onnx-static", "onnx-two", "dynamo-multi")
#: Lengths of the prompts after which the first token is timed.
PROMPTS = (64, 400)
_TEXT = "The river runs past the mill, and the miller counts what it brings. " * 40

#: Name of a measurement -> the CPU seconds that it took in each round of each process.
Times = dict[str, list[float]]


def measured(folder: Path, layers: int, count: int, rounds: int) -> dict[str, Times]:
    """All measurements: `decode` for 64 tokens, and `first 64` and `first 400` for one token.

    Where a session's weights come to lie in memory makes a tenth of difference, so several processes are measured, each of
    which loads the contenders in another order.

    Args:
        folder: Where the exports are.
        layers: How many layers they have; 0 for all.
        count: How many processes.
        rounds: How often each of them measures everything.
    """
    found: dict[str, Times] = {}
    for turn in range(count):
        arguments = (str(folder), str(layers), str(rounds), str(turn))
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
    for name in ("eager", *(f"generate {name}" for name in GENERATORS)):
        speed = f"{TOKENS / min(times[name]):.1f}"
        rows.append([name.removeprefix("generate "), speed, _ratio(times, "eager", name)])
    return processes.table(["way", "tokens/s", "over eager"], rows)


def _loop(times: Times) -> str:
    rows = []
    for name in ("onnx-multi", "onnx-static"):
        pair = f"generate {name}", f"bare {name}"
        rows.append([name, *(_per_token(times[key]) for key in pair), _ratio(times, *pair)])
    return processes.table(["way", "generate, ms/token", "bare loop, ms/token", "generate / bare"], rows)


def _graph(times: Times) -> str:
    rows = []
    pairs = (("onnx-multi", "peer-multi"), ("onnx-multi", "peer-fused"), ("onnx-static", "peer-static"))
    for names in pairs:
        keys = [f"bare {name}" for name in names]
        rows.append([*names, *(_per_token(times[key]) for key in keys), _ratio(times, *keys)])
    return processes.table(
        ["our graph", "peer's graph", "ours, ms/token", "peer's, ms/token", "ours / peer"], rows, words=2
    )


def _per_token(times: list[float]) -> str:
    return f"{1000 * min(times) / TOKENS:.2f}"


def _first(found: dict[str, Times]) -> str:
    order = ["eager", *(f"generate {name}" for name in GENERATORS)]
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


def _work(folder: Path, layers: int, rounds: int, turn: int) -> dict[str, Times]:
    torch.set_num_threads(1)
    model, tokenizer = models.language_model(exports.source(folder), layers)
    generators: dict[str, Any] = {"eager": model}
    loops: dict[str, Any] = {}
    names = [*GENERATORS, *exports.PEER]
    first = turn * len(GENERATORS) % len(names)  # ours before the peer's, and the other way round
    for name in [*names[first:], *names[:first]]:
        target = folder / f"{name}-{layers}"
        if name in exports.PEER:
            loops[f"bare {name}"] = _loop_of(name, bare_loops.session(str(target / "model.onnx")))
            continue
        loaded = generators[f"generate {name}"] = _loaded(target, name)
        session = loaded.caller("decode").runner.session if name.startswith("onnx-") else None
        if session is not None and name != "onnx-two":
            loops[f"bare {name}"] = _loop_of(name, session)
    prompts = {"decode": dict(tokenizer(exports.PROMPT, return_tensors="pt"))}
    for length in PROMPTS:
        prompts[f"first {length}"] = dict(
            tokenizer(_TEXT, return_tensors="pt", truncation=True, max_length=length)
        )
    return {
        question: _timed(_calls(generators, loops, prompt, TOKENS if question == "decode" else 1), rounds)
        for question, prompt in prompts.items()
    }


def _loaded(folder: Path, name: str) -> Any:
    from polyport import ExportedModel

    options = {"session_options": bare_loops.one_thread()} if name.startswith("onnx-") else {}
    return ExportedModel.from_pretrained(folder, **options)


def _loop_of(name: str, session: Any) -> Any:
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
    parser.add_argument("--worker", nargs=4, metavar=("FOLDER", "LAYERS", "ROUNDS", "TURN"), required=True)
    folder, *numbers = parser.parse_args().worker
    print(json.dumps(_work(Path(folder), *map(int, numbers))))
