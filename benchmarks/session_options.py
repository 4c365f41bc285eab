"""What ONNX Runtime's fused SkipLayerNormalization costs on the CPU, for an exported encoder.

`python benchmarks/session_options.py EXPORT_DIR`: milliseconds of one call with and without the fusion, the best of interleaved
repeats in one run, and their ratio.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort

SHAPES = ((1, 16), (1, 128), (8, 16), (8, 128))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("export", type=Path, help="folder of an exported text encoder (onnx)")
    parser.add_argument("--repeats", type=int, default=12)
    arguments = parser.parse_args()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    path, provider = str(arguments.export / "model.onnx"), ["CPUExecutionProvider"]
    sessions = {
        "fused": ort.InferenceSession(path, options, providers=provider),
        "apart": ort.InferenceSession(
            path, options, providers=provider, disabled_optimizers=["SkipLayerNormFusion"]
        ),
    }
    names = [value.name for value in sessions["fused"].get_inputs()]
    for batch, length in SHAPES:
        feeds = {name: np.ones((batch, length), dtype=np.int64) for name in names}
        best = dict.fromkeys(sessions, float("inf"))
        for _ in range(arguments.repeats):
            for name, session in sessions.items():
                start = time.perf_counter()
                session.run(None, feeds)
                best[name] = min(best[name], time.perf_counter() - start)
        fused, apart = best["fused"] * 1e3, best["apart"] * 1e3
        print(f"{batch}x{length}: fused {fused:.2f} ms, apart {apart:.2f} ms, ratio {fused / apart:.2f}")


if __name__ == "__main__":
    main()
