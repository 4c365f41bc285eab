"""Exports of a language model for generation, each made in a process of its own (see `generation.py`)."""

from __future__ import annotations

import copy
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import models
import processes

#: Tokens that a static cache has room for.
ROOM = 512
PROMPT = "Hello, my name is"

#: Ours, by format and way: two graphs, or one that takes any number of tokens, with a growing or a static cache.
OURS = ("onnx-multi", "onnx-static", "onnx-two", "dynamo-multi", "dynamo-static", "dynamo-two")
#: The peer's decode graph for any number of tokens: as it is, with ONNX Runtime's operators, with a static cache.
PEER = ("peer-multi", "peer-fused", "peer-static")


def source(folder: Path) -> Path:
    """Where the model itself is."""
    return folder / "model"


def made(folder: Path, name: str, layers: int, repeat: int = 0) -> dict[str, float]:
    """CPU seconds and disk of an export, which is made unless the folder has it.

    Args:
        folder: Where all exports are.
        name: One of `OURS` or `PEER`.
        layers: Of how many of the model's layers; 0 for all.
        repeat: A number for each further export, which is measured and not kept.
    """
    target = folder / f"{name}-{layers}"
    record = target.with_suffix(f".{repeat}.json")
    if not record.exists():
        kept = str(target) if repeat == 0 else ""
        result = processes.measure(Path(__file__), str(folder), name, str(layers), kept)
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(result) + "\n")
    values: dict[str, float] = json.loads(record.read_text())
    return values


def _work(folder: Path, name: str, layers: int, target: str) -> dict[str, float]:
    model, tokenizer = models.language_model(source(folder), layers)
    inputs = dict(tokenizer(PROMPT, return_tensors="pt"))
    settings = copy.deepcopy(model.generation_config)
    if name.endswith("static"):
        settings.update(cache_implementation="static", max_cache_len=ROOM)
    start = time.process_time()
    exported = (_peer if name in PEER else _ours)(name, model, inputs, settings)
    values = {"export_s": time.process_time() - start}
    if target:
        exported.save_pretrained(target)
        files = [path.stat().st_size for path in Path(target).rglob("*") if path.is_file()]
        values["weights"] = models.weight_bytes(model)
        values["disk_ratio"] = sum(files) / values["weights"]
    return values


def _ours(name: str, model: Any, inputs: dict[str, Any], settings: Any) -> Any:
    import polyport

    export_format, _, way = name.partition("-")
    config = polyport.AutoExportConfig.from_dict({"export_format": export_format, "dynamic": True})
    exporter = polyport.AutoHfExporter.from_config(config)
    return exporter.export_for_generation(model, inputs, config, settings, multi_token_decode=way != "two")


def _peer(name: str, model: Any, inputs: dict[str, Any], settings: Any) -> Any:
    """The decode graph alone: `export_for_generation` would make one for the prompt as well, which takes as long."""
    onnx = importlib.import_module("transformers.exporters.exporter_onnx")
    taken_apart = importlib.import_module("transformers.exporters.utils").decompose_for_generation
    parts = taken_apart(model, inputs, generation_config=settings, multi_token_decode=True)
    config = onnx.OnnxConfig(dynamic=True, ort_fusions="cpu" if name == "peer-fused" else None)
    return onnx.OnnxExporter().export(*parts["decode"], config)


if __name__ == "__main__":
    _, _, folder, name, layers, target = sys.argv
    print(json.dumps(_work(Path(folder), name, int(layers), target)))
