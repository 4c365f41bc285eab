"""Exports of a language model for generation, each made in a process of its own (see `generation.py`)."""

from __future__ import annotations

import copy
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import models
import processes

#: Tokens that a static cache has room for, and that ExecuTorch plans memory for.
ROOM = 512
PROMPT = "Hello, my name is"
#: What prompts of a given length begin with.
LONG_TEXT = "The river runs past the mill, and the miller counts what it brings. " * 40

#: Ours, by format and way: two graphs, or one that takes any number of tokens, with a growing or a static cache.
#: OpenVINO keeps the cache in the runtime, or (*stateless*) takes and returns it; ExecuTorch the other way round (*stateful*).
OURS = (
    "onnx-multi",
    "onnx-static",
    "onnx-two",
    "dynamo-multi",
    "dynamo-static",
    "dynamo-two",
    "openvino-multi",
    "openvino-stateless",
    "executorch-multi",
    "executorch-stateful",
    "executorch-two",
    "executorch-static",
)
#: The peer's decode graph for any number of tokens. ONNX: as it is, with ONNX Runtime's operators, with a static cache.
PEER = (
    "peer-multi",
    "peer-fused",
    "peer-static",
    "peer-openvino-multi",
    "peer-openvino-stateless",
    "peer-executorch-multi",
    "peer-executorch-static",
    "peer-executorch-default",
)
#: What `generation.py` compares.
FORMATS = ("onnx", "dynamo", "openvino")


def format_of(name: str) -> str:
    """Format of an export; the peer's that say none are ONNX."""
    first = name.removeprefix("peer-").partition("-")[0]
    return first if first in (*FORMATS, "executorch") else "onnx"


def source(folder: Path) -> Path:
    """Where the model itself is."""
    return folder / "model"


def made(folder: Path, name: str, layers: int, repeat: int = 0) -> dict[str, float]:
    """CPU seconds, memory and disk of an export, which is made unless the folder has it.

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


def loaded(folder: Path, name: str) -> Any:
    """One of ours, for one thread.

    Args:
        folder: Where it was saved.
        name: One of `OURS`.
    """
    from polyport import ExportedModel

    options: dict[str, Any] = {}
    if format_of(name) == "onnx":
        import bare_loops

        options["session_options"] = bare_loops.one_thread()
    elif format_of(name) == "openvino":
        options["config"] = {"INFERENCE_NUM_THREADS": 1}
    elif format_of(name) == "executorch":
        import executorch_loops

        executorch_loops.one_thread()
    return ExportedModel.from_pretrained(folder, **options)


def _work(folder: Path, name: str, layers: int, target: str) -> dict[str, float]:
    model, tokenizer = models.language_model(source(folder), layers)
    inputs = dict(tokenizer(PROMPT, return_tensors="pt"))
    settings = copy.deepcopy(model.generation_config)
    if name.endswith("static"):
        settings.update(cache_implementation="static", max_cache_len=ROOM)
    weights = models.weight_bytes(model)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.sum()  # weights that are mapped from a file count only once they are read
    before = processes.resident()
    processes.reset_peak()
    start = time.process_time()
    exported = (_peer if name in PEER else _ours)(name, model, inputs, settings)
    values = {"export_s": time.process_time() - start}
    values["peak_ratio"] = (processes.peak() - before) / weights
    with tempfile.TemporaryDirectory(prefix="polyport-bench-", dir=folder) as temporary:
        kept = Path(target or temporary)
        start = time.process_time()
        exported.save_pretrained(kept)
        values["save_s"] = time.process_time() - start
        files = [path.stat().st_size for path in kept.rglob("*") if path.is_file()]
    return values | {"weights": weights, "disk_ratio": sum(files) / weights}


def _ours(name: str, model: Any, inputs: dict[str, Any], settings: Any) -> Any:
    import polyport

    export_format, _, way = name.partition("-")
    options: dict[str, Any] = {"export_format": export_format, "dynamic": True}
    if way in ("stateful", "stateless"):
        options["stateful"] = way == "stateful"
    if export_format == "executorch":
        options["max_sizes"] = {"sequence": ROOM, "cache_length" if way == "static" else "past": ROOM}
    config = polyport.AutoExportConfig.from_dict(options)
    exporter = polyport.AutoHfExporter.from_config(config)
    return exporter.export_for_generation(model, inputs, config, settings, multi_token_decode=way != "two")


def _peer(name: str, model: Any, inputs: dict[str, Any], settings: Any) -> Any:
    """The decode graph alone: `export_for_generation` would make one for the prompt as well, which takes as long."""
    peer = importlib.import_module("transformers.exporters")
    taken_apart = importlib.import_module("transformers.exporters.utils").decompose_for_generation
    parts = taken_apart(model, inputs, generation_config=settings, multi_token_decode=True)
    if format_of(name) == "openvino":
        config = peer.OpenVINOConfig(dynamic=True, stateful=not name.endswith("stateless"))
        return peer.OpenVINOExporter().export(*parts["decode"], config)
    if format_of(name) == "executorch":
        shapes = None if name.endswith("default") else _peer_shapes(parts["decode"][1])
        config = peer.ExecutorchConfig(dynamic=True, dynamic_shapes=shapes)
        return peer.ExecutorchExporter().export(*parts["decode"], config)
    config = peer.OnnxConfig(dynamic=True, ort_fusions="cpu" if name == "peer-fused" else None)
    return peer.OnnxExporter().export(*parts["decode"], config)


def _peer_shapes(inputs: dict[str, Any]) -> dict[str, Any]:
    """Which axes vary, and how far: left to itself, the peer's program takes at most 64 tokens at a time.

    Args:
        inputs: What its decode graph is traced with.
    """
    import torch

    sequence = torch.export.Dim("sequence", min=1, max=ROOM)
    past = torch.export.Dim("past", min=1, max=ROOM)
    static = type(inputs["cache"]).__name__ == "StaticCache"
    # keys, values and, of a static cache, how many there are
    layer: list[Any] = [None] * 3 if static else [{2: past}] * 2
    shapes: dict[str, Any] = {"input_ids": {1: sequence}, "position_ids": {1: sequence}}
    if "attention_mask" in inputs:  # that of a static cache: rows x 1 x sequence x room
        shapes["attention_mask"] = {2: sequence}
    return shapes | {"cache": layer * len(inputs["cache"].layers)}


if __name__ == "__main__":
    _, _, folder, name, layers, target = sys.argv
    print(json.dumps(_work(Path(folder), name, int(layers), target)))
