"""What an export costs: CPU time, memory and disk, beside the peer (transformers.exporters).

    python benchmarks/export_cost.py --repeats 3

Every measurement is a process of its own, one thread, ours and the peer's in turn. Three kinds:

* `cold`: a fresh process that has only torch, transformers and the model: CPU seconds of importing the exporter and
  exporting, and of saving; size on disk.
* `warm`: after a first export of a tiny model: CPU seconds of the export alone, and the most memory it takes above what the
  process holds before it.
* `load`: CPU seconds and memory of loading a saved export, and of its first call.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import processes

SYSTEMS = ("ours", "peer")
Measurement = dict[str, float]


def main() -> None:
    """Run the command."""
    options = _parser().parse_args()
    if options.worker:
        print(json.dumps(work(*options.worker)))
        return
    rows = []
    for model in options.models:
        for name in options.formats:
            measured: dict[str, list[Measurement]] = {system: [] for system in SYSTEMS}
            for _ in range(options.repeats):
                for system in SYSTEMS:  # in turn, so that both meet the same weather
                    with tempfile.TemporaryDirectory(prefix="polyport-bench-") as folder:
                        values: Measurement = {}
                        for kind in ("cold", "warm", "load"):
                            values |= measure(kind, system, model, name, folder)
                    measured[system].append(values)
            row: dict[str, Any] = {"model": model, "format": name}
            for system in SYSTEMS:
                keys = measured[system][0]
                row[system] = {k: statistics.median(m[k] for m in measured[system]) for k in keys}
            rows.append(row)
            print(json.dumps(row), flush=True)
    print(table(rows))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["minilm", "bert-base"])
    parser.add_argument("--formats", nargs="+", default=["dynamo", "onnx", "openvino"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file for the medians")
    parser.add_argument(
        "--worker", nargs=5, metavar=("KIND", "SYSTEM", "MODEL", "FORMAT", "FOLDER"), help=argparse.SUPPRESS
    )
    return parser


def measure(*worker: str) -> Measurement:
    """What one process of the given kind, system, model, format and folder measures."""
    result: Measurement = processes.measure(Path(__file__), *worker)
    return result


def table(rows: list[dict[str, Any]]) -> str:
    """The medians as a table: ours, the peer's, and the ratio, for each quantity."""
    quantities = {
        "export_cold_s": "export, cold, CPU s",
        "export_warm_s": "export, warm, CPU s",
        "save_s": "save, CPU s",
        "memory_ratio": "peak memory, × weights",
        "disk_ratio": "disk, × weights",
        "ready_s": "load and first call, CPU s",
        "load_memory_ratio": "memory after load and first call, × weights",
    }
    lines = ["| model | format | quantity | ours | peer | ours / peer |", "|---|---|---|---:|---:|---:|"]
    for row in rows:
        for key, title in quantities.items():
            ours, peer = row["ours"][key], row["peer"][key]
            ratio = f"{ours / peer:.2f}" if peer else ""
            lines.append(
                f"| {row['model']} | {row['format']} | {title} | {ours:.2f} | {peer:.2f} | {ratio} |"
            )
    return "\n".join(lines)


# ── in the process of one measurement ───────────────────────────────────────────────────────────────────────────────


def work(kind: str, system: str, model_name: str, name: str, folder: str) -> Measurement:
    """One measurement, in this process."""
    import models

    if kind == "load":
        return _load(system, folder, name, *models.build(model_name))
    if kind == "warm":
        tiny, tiny_inputs = models.build("tiny-bert")
        exported = _export(system, tiny, tiny_inputs, name)
        with tempfile.TemporaryDirectory() as temporary:
            exported.save_pretrained(temporary)
    model, inputs = models.build(model_name)
    weights = models.weight_bytes(model)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.sum()  # weights that are mapped from a file count only once they are read
    before = processes.resident()
    processes.reset_peak()
    start = time.process_time()
    exported = _export(system, model, inputs, name)
    spent = time.process_time() - start
    peak = processes.peak()
    if kind == "warm":
        return {"export_warm_s": spent, "memory_ratio": (peak - before) / weights}
    start = time.process_time()
    exported.save_pretrained(folder)
    saved = time.process_time() - start
    disk = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return {"export_cold_s": spent, "save_s": saved, "disk_ratio": disk / weights}


def _export(system: str, model: Any, inputs: dict[str, Any], name: str) -> Any:
    module = importlib.import_module("polyport" if system == "ours" else "transformers.exporters.auto")
    config = module.AutoExportConfig.from_dict({"export_format": name, "dynamic": True})
    return module.AutoHfExporter.from_config(config).export(model, inputs, config=config)


def load(system: str, folder: str, **options: Any) -> Any:
    """A saved export, loaded to run on the CPU."""
    module = importlib.import_module("polyport" if system == "ours" else "transformers.exporters.base")
    return module.ExportedModel.from_pretrained(folder, trust_remote_code=True).to("cpu", **options)


def one_thread(name: str) -> dict[str, Any]:
    """Options of `load` that keep a runtime to one thread, which not all learn from the environment.

    Args:
        name: The format.
    """
    if name == "openvino":
        return {"config": {"INFERENCE_NUM_THREADS": 1}}
    if name == "onnx":
        import bare_loops

        return {"session_options": bare_loops.one_thread()}
    return {}


def _load(system: str, folder: str, name: str, model: Any, inputs: dict[str, Any]) -> Measurement:
    import models

    weights = models.weight_bytes(model)
    del model
    gc.collect()
    importlib.import_module("polyport" if system == "ours" else "transformers.exporters.base")
    options = one_thread(name) if name == "openvino" else {}
    before = processes.resident()
    start = time.process_time()
    exported = load(system, folder, **options)
    loaded = time.process_time() - start
    exported(**inputs)  # one of the two makes the runtime's session while loading, the other one here
    ready = time.process_time() - start
    return {
        "load_s": loaded,
        "ready_s": ready,
        "load_memory_ratio": (processes.resident() - before) / weights,
    }


if __name__ == "__main__":
    main()
