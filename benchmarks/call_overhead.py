"""What one call of an export costs above the bare runtime, beside the peer (transformers.exporters).

    python benchmarks/call_overhead.py

A tiny BERT, one row of 8 tokens, so that the call itself is nearly all there is. Ours and the peer's export are made and saved in
processes of their own, and then timed in one process, in turn: the bare runtime on the very program (`session.run`, the
`module()` of the exported program, or an infer request), and the call of the loaded export. Microseconds, the least of many
repeats, one thread.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import export_cost
import processes

SYSTEMS = export_cost.SYSTEMS

#: Calls per timing: many enough for the clock, few enough to fit between interruptions.
CALLS = 5


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", default=["onnx", "dynamo", "openvino"])
    parser.add_argument("--rounds", type=int, default=300, help=f"rounds of {CALLS} calls of each")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    parser.add_argument("--worker", nargs=2, metavar=("FORMAT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(_work(options.worker[0], options.worker[1], options.rounds)))
        return
    rows = []
    for name in options.formats:
        with tempfile.TemporaryDirectory(prefix="polyport-bench-") as folder:
            for system in SYSTEMS:
                export_cost.measure("cold", system, "tiny-bert", name, str(Path(folder, system)))
            found = processes.measure(Path(__file__), name, folder, "--rounds", str(options.rounds))
            rows.append({"format": name, **found})
    print(table(rows))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """The numbers as a table."""
    lines = [
        "| format | eager | bare, our program | our call | over bare | bare, peer's program | peer's call | over bare |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [row["eager"]]
        for system in SYSTEMS:
            bare, call = row[f"bare, {system}"], row[f"call, {system}"]
            cells += [bare, call, call - bare]
        lines.append(f"| {row['format']} | {' | '.join(f'{cell:.0f}' for cell in cells)} |")
    return "\n".join(lines)


# ── in the process that measures ────────────────────────────────────────────────────────────────────────────────────


def _work(name: str, folder: str, rounds: int) -> dict[str, float]:
    import models
    import torch

    torch.set_num_threads(1)
    model, inputs = models.build("tiny-bert")
    inputs = {key: value[:1, :8].contiguous() for key, value in inputs.items()}
    calls: dict[str, Callable[[], Any]] = {"eager": functools.partial(model, **inputs)}
    for system in SYSTEMS:
        exported = export_cost.load(system, str(Path(folder, system)), **export_cost.one_thread(name))
        calls[f"bare, {system}"] = _bare(name, exported, Path(folder, system), inputs)
        calls[f"call, {system}"] = functools.partial(exported, **inputs)
    best = dict.fromkeys(calls, float("inf"))
    with torch.no_grad():
        for call in calls.values():
            for _ in range(10):
                call()
        for _ in range(rounds):
            for key, call in calls.items():
                start = time.perf_counter_ns()
                for _ in range(CALLS):
                    call()
                best[key] = min(best[key], (time.perf_counter_ns() - start) / CALLS / 1000)
    return best


def _bare(name: str, exported: Any, folder: Path, inputs: dict[str, Any]) -> Callable[[], Any]:
    if name == "dynamo":
        module = exported.program.module()
        return lambda: module(**inputs)
    if name == "openvino":
        return _bare_openvino(folder, inputs)
    import bare_loops

    session = bare_loops.session(str(folder / "model.onnx"))
    names = [value.name for value in session.get_inputs()]
    arrays = [inputs[key].numpy() for key in _order(names, inputs)]
    feeds = dict(zip(names, arrays, strict=True))
    return lambda: session.run(None, feeds)


def _bare_openvino(folder: Path, inputs: dict[str, Any]) -> Callable[[], Any]:
    import openvino
    import openvino_loops

    model = openvino_loops.compiled(openvino_loops.graph(folder))
    request = model.create_infer_request()
    keys = _order([tensor.any_name for tensor in model.inputs], inputs)
    tensors = [openvino.Tensor(inputs[key].numpy(), shared_memory=True) for key in keys]

    def call() -> Any:
        for index, tensor in enumerate(tensors):
            request.set_input_tensor(index, tensor)
        request.infer()
        return [request.get_output_tensor(index).data for index in range(len(model.outputs))]

    return call


def _order(names: list[str], inputs: dict[str, Any]) -> list[str]:
    """Which kwarg each graph input is: exporters prefix their names, but keep the kwarg's own in them."""
    return [next(key for key in inputs if name.endswith(key)) for name in names]


if __name__ == "__main__":
    main()
