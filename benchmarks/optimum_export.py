"""The export of a language model by optimum-intel, in an interpreter that has it (see `openvino_decode.py`)."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import processes


def _work(source: Path, target: Path) -> dict[str, float]:
    import torch
    import transformers

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    tensors = (*model.parameters(), *model.buffers())
    weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    for tensor in tensors:
        tensor.sum()  # weights that are mapped from a file count only once they are read
    before = processes.resident()
    processes.reset_peak()
    start = time.process_time()
    from optimum.exporters.openvino import export_from_model

    export_from_model(model, target, task="text-generation-with-past", stateful=True)
    spent = time.process_time() - start
    peak = processes.peak()
    disk = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return {
        "export_and_save_s": spent,
        "peak_ratio": (peak - before) / weights,
        "weights": weights,
        "disk_ratio": disk / weights,
    }


if __name__ == "__main__":
    _, _, source, target = sys.argv
    print(json.dumps(_work(Path(source), Path(target))))
