"""Memory that exports of a language model take while they load and generate (see `generation.py`)."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import generation_exports as exports
import processes

#: Code is no part of what is measured: it is imported before.
_CODE = ("transformers.models.llama.modeling_llama", "transformers.generation.utils")
_CODE_OF = {
    "onnx": ("polyport_onnx.runner", "bare_loops"),
    "dynamo": ("polyport_dynamo.runner", "polyport_dynamo.archive"),
    "openvino": ("polyport_openvino.runner",),
}


def measured(folder: Path, name: str, layers: int) -> dict[str, int]:
    """Bytes above the bare process: `loading` and `generating` at most, and `held` afterwards."""
    target = folder / f"{name}-{layers}"
    result: dict[str, int] = processes.measure(Path(__file__), str(target), name)
    return result


def _work(folder: Path, name: str) -> dict[str, int]:
    import torch

    torch.set_num_threads(1)
    for module in ("polyport", *_CODE, *_CODE_OF[exports.format_of(name)]):
        importlib.import_module(module)
    before = processes.resident()
    processes.reset_peak()
    exported = exports.loaded(folder, name)
    for component in exported:  # the runtime's sessions are made here
        exported.caller(component)
    loading = processes.peak() - before
    processes.reset_peak()
    exported.generate(torch.tensor([[1, 2, 3, 4]]), max_new_tokens=64, do_sample=False)
    generating = processes.peak() - before
    return {"loading": loading, "generating": generating, "held": processes.resident() - before}


def table(found: dict[str, dict[str, int]], disk: dict[str, float], weights: int) -> str:
    """The measurements as multiples of the weights.

    Args:
        found: Export -> its measurements.
        disk: Export -> size on disk, over the weights.
        weights: Size of the model's parameters.
    """
    rows = []
    for name in found:
        cells = [
            f"{found[name][key] / weights:.2f} ({found[name][key] / 2**20:.0f} MiB)"
            for key in ("loading", "generating", "held")
        ]
        rows.append([name, *cells, f"{disk[name]:.3f}"])
    return processes.table(["way", "loading, at most", "generating, at most", "held after", "disk"], rows)


if __name__ == "__main__":
    print(json.dumps(_work(Path(sys.argv[2]), sys.argv[3])))
