"""What loading an ExecuTorch export costs, in a process of its own (see `executorch_decode.py`)."""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import processes

#: `polyport` loads the export and generates a token; `bare` loads the method alone and executes it once.
WAYS = ("polyport", "bare")
#: Code is no part of what is measured: it is imported before.
_CODE = (
    "polyport",
    "polyport_executorch.runner",
    "generation_exports",
    "transformers.models.llama.modeling_llama",
    "transformers.generation.utils",
)
_PROMPT = [1, 2, 3, 4]


def measured(folder: Path, way: str) -> dict[str, float]:
    """CPU seconds of loading (`load_s`) and with the first call (`ready_s`), and bytes above the bare process.

    `held` counts what is in use afterwards, `private` what of it is no page of the file, `most` what was in use at most.

    Args:
        folder: Where the export was saved.
        way: One of `WAYS`.
    """
    result: dict[str, float] = processes.measure(Path(__file__), way, str(folder))
    return result


def _work(way: str, folder: Path) -> dict[str, float]:
    import executorch_loops
    import torch

    torch.set_num_threads(1)
    executorch_loops.one_thread()
    for module in _CODE if way == "polyport" else ():
        importlib.import_module(module)
    resident, private = processes.resident(), processes.private()
    processes.reset_peak()
    start = time.process_time()
    spent = {}
    if way == "polyport":
        exported = sys.modules["generation_exports"].loaded(folder, folder.name)
        for component in exported:  # methods are loaded here
            exported.caller(component)
        spent["load_s"] = time.process_time() - start
        exported.generate(torch.tensor([_PROMPT]), max_new_tokens=1, do_sample=False)
    else:
        loop = executorch_loops.loop(folder)
        spent["load_s"] = time.process_time() - start
        loop(_PROMPT, 1)
    spent["ready_s"] = time.process_time() - start
    return spent | {
        "most": processes.peak() - resident,
        "held": processes.resident() - resident,
        "private": processes.private() - private,
    }


def table(found: Mapping[str, list[dict[str, float]]], weights: float) -> str:
    """The least of the seconds, and the medians of the memory in multiples of the weights.

    Args:
        found: Export and way -> its measurements.
        weights: Size of the model's parameters.
    """
    rows = []
    for name, records in found.items():
        least = [min(record[key] for record in records) for key in ("load_s", "ready_s")]
        memory = [statistics.median(record[key] for record in records) for key in ("most", "held", "private")]
        rows.append([name, *(f"{value:.2f}" for value in (*least, *(one / weights for one in memory)))])
    head = ["export", "loading, CPU s", "and first call, CPU s", "memory at most, × weights"]
    return processes.table([*head, "held after", "of it not in the file"], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=2, metavar=("WAY", "FOLDER"), required=True)
    way, folder = parser.parse_args().worker
    print(json.dumps(_work(way, Path(folder))))
