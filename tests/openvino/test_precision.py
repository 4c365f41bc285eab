"""Models compute in the precision they were exported in, and no precision ends the process."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as opset
import pytest
import torch
from openvino_graphs import graph, infos

from polyport import ExportedModel
from polyport.errors import InputError
from polyport_openvino import OpenVINOConfig, OpenVINOExporter, compiling, precision


def _property(export: ExportedModel, name: str) -> Any:
    runner: Any = export.caller("model").runner
    return runner.compiled.get_property(name)


def test_float32_stays_float32(saved: Path, tiny_bert: Any, token_ids: Any) -> None:
    """Where the CPU has bfloat16, OpenVINO by itself would use it, and 8 bits for caches."""
    export = ExportedModel.from_pretrained(saved)
    for batch, length in ((1, 5), (3, 17)):
        inputs = token_ids(batch, length)
        with torch.no_grad():
            expected = tiny_bert(**inputs).last_hidden_state
        torch.testing.assert_close(export(**inputs).last_hidden_state, expected, atol=2e-6, rtol=1e-6)
    assert _property(export, "INFERENCE_PRECISION_HINT") in (ov.Type.dynamic, ov.Type.f32)
    assert _property(export, "KV_CACHE_PRECISION") == ov.Type.f32
    assert _property(export, "DYNAMIC_QUANTIZATION_GROUP_SIZE") == 0


@pytest.mark.parametrize("value", ["bf16", ov.Type.bf16, "f32"], ids=str)
def test_precision_that_is_asked_for(saved: Path, tiny_bert: Any, token_ids: Any, value: Any) -> None:
    export = ExportedModel.from_pretrained(saved, config={"INFERENCE_PRECISION_HINT": value})
    inputs = token_ids(2, 9)
    with torch.no_grad():
        expected = tiny_bert(**inputs).last_hidden_state
    got = export(**inputs).last_hidden_state
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=5e-2, rtol=0)
    expected_type = value if isinstance(value, ov.Type) else {"bf16": ov.Type.bf16, "f32": ov.Type.f32}[value]
    assert _property(export, "INFERENCE_PRECISION_HINT") == expected_type


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_models(tiny_bert: Any, token_ids: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    """As close to the float32 model as eager in that precision is, give or take."""
    model = copy.deepcopy(tiny_bert).to(dtype)
    precise = copy.deepcopy(model).float()
    export = OpenVINOExporter().export(model, token_ids(2, 5), OpenVINOConfig(dynamic=True))
    export.save_pretrained(tmp_path / "out")
    for source in (export, ExportedModel.from_pretrained(tmp_path / "out")):
        for batch, length in ((2, 5), (1, 3), (3, 12)):
            inputs = token_ids(batch, length)
            with torch.no_grad():
                eager = model(**inputs).last_hidden_state.float()
                expected = precise(**inputs).last_hidden_state
            got = source(**inputs).last_hidden_state
            assert got.dtype == source.dtype == dtype
            off, allowed = (got.float() - expected).abs(), (eager - expected).abs()
            assert float(off.max()) < 2 * float(allowed.max())
            assert float(off.mean()) < 1.2 * float(allowed.mean())


def test_float64_models(tiny_bert: Any, token_ids: Any) -> None:
    model = copy.deepcopy(tiny_bert).double()
    inputs = token_ids(2, 5)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
    got = OpenVINOExporter().export(model, inputs, OpenVINOConfig(dynamic=True))(**inputs).last_hidden_state
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)  # the CPU has no kernels but for float32


# ── one thread ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _product(dtype: str) -> ov.Model:
    inputs = infos(x=(dtype, "n", 4))
    kind = {"float32": ov.Type.f32, "bfloat16": ov.Type.bf16, "float16": ov.Type.f16}[dtype]
    return graph(
        inputs, ["y"], lambda x: opset.matmul(x, opset.constant(np.ones((4, 4)), kind), False, False)
    )


@pytest.mark.parametrize(
    ("properties", "cores", "expected"),
    [
        ({}, 1, 1),
        ({}, 8, 8),
        ({"INFERENCE_NUM_THREADS": 1}, 8, 1),
        ({"INFERENCE_NUM_THREADS": "1"}, 8, 1),
        ({"INFERENCE_NUM_THREADS": 4}, 1, 1),
        ({"INFERENCE_NUM_THREADS": 4}, 8, 4),
        ({"INFERENCE_NUM_THREADS": 0}, 8, 8),
        ({"INFERENCE_NUM_THREADS": "many"}, 8, 8),
        ({"NUM_STREAMS": 4}, 8, 2),
        ({"NUM_STREAMS": 8}, 8, 1),
        ({"NUM_STREAMS": "AUTO"}, 8, 1),
        ({"PERFORMANCE_HINT": "THROUGHPUT"}, 8, 1),
        ({"PERFORMANCE_HINT": "LATENCY"}, 8, 8),
    ],
)
def test_threads_of_a_call(properties: dict[str, Any], cores: int, expected: int) -> None:
    assert precision.threads_per_stream(properties, cores) == expected


@pytest.mark.parametrize(
    ("dtype", "properties", "expected"),
    [
        ("float32", {}, "f32"),
        ("float32", {"EXECUTION_MODE_HINT": "ACCURACY"}, "f32"),
        ("float32", {"INFERENCE_PRECISION_HINT": "bf16"}, "bf16"),
        ("float32", {"INFERENCE_PRECISION_HINT": ov.Type.f16}, "f16"),
        ("float32", {"INFERENCE_PRECISION_HINT": "f32", "EXECUTION_MODE_HINT": "PERFORMANCE"}, "f32"),
        ("float32", {"EXECUTION_MODE_HINT": "PERFORMANCE"}, "bf16"),
        ("bfloat16", {}, "bf16"),
        ("bfloat16", {"INFERENCE_PRECISION_HINT": "f32"}, "bf16"),
        ("float16", {}, "f32"),
    ],
)
def test_precision_of_a_call(
    monkeypatch: pytest.MonkeyPatch, dtype: str, properties: dict[str, Any], expected: str
) -> None:
    class Core:
        """A CPU that has bfloat16 but not float16."""

        def get_property(self, device: str, name: str) -> Any:
            return {"OPTIMIZATION_CAPABILITIES": ["FP32", "BF16"], "INFERENCE_PRECISION_HINT": ov.Type.bf16}[
                name
            ]

    monkeypatch.setattr(precision, "core", Core)
    assert precision.precision(_product(dtype), properties) == expected


@pytest.mark.parametrize(
    ("config", "cores"),
    [
        ({"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": 1}, 2),
        ({"INFERENCE_PRECISION_HINT": "bf16"}, 1),
        ({"INFERENCE_PRECISION_HINT": "f16", "NUM_STREAMS": 2}, 2),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "AUTO"])
def test_one_thread_in_half_precision_is_refused_on_amx(
    saved: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], cores: int, device: str
) -> None:
    monkeypatch.setattr(precision, "has_amx", lambda: True)
    monkeypatch.setattr(compiling, "cores", lambda: cores)
    with pytest.raises(
        InputError, match=r"in (bf16|f16) with a single thread.*INFERENCE_NUM_THREADS.*float32"
    ):
        ExportedModel.from_pretrained(saved, device=device, config=config).caller("model")


def test_one_thread_in_float32_is_not_refused(
    saved: Path, monkeypatch: pytest.MonkeyPatch, token_ids: Any
) -> None:
    monkeypatch.setattr(precision, "has_amx", lambda: True)
    export = ExportedModel.from_pretrained(saved, config={"INFERENCE_NUM_THREADS": 1})
    assert export(**token_ids(1, 3)).last_hidden_state.shape == (1, 3, 32)


_RUN = """
import os, sys, torch
if sys.argv[2] == "pinned":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from polyport import ExportedModel
from polyport.errors import InputError
config = {"INFERENCE_PRECISION_HINT": "bf16"} if sys.argv[3] == "hint" else {"EXECUTION_MODE_HINT": "PERFORMANCE"}
if sys.argv[2] == "told":
    config["INFERENCE_NUM_THREADS"] = 1
export = ExportedModel.from_pretrained(sys.argv[1], config=config)
inputs = {name: torch.ones(2, 7, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
inputs["token_type_ids"] = torch.zeros(2, 7, dtype=torch.int64)
try:
    print("ran", bool(export(**inputs).last_hidden_state.isfinite().all()))
except InputError as error:
    print("refused", "single thread" in str(error))
"""


@pytest.mark.parametrize("thread", ["told", *(["pinned"] if hasattr(os, "sched_setaffinity") else [])])
@pytest.mark.parametrize("asked", ["hint", "mode"])
def test_the_process_survives_one_thread_in_half_precision(saved: Path, thread: str, asked: str) -> None:
    """It runs, or it is refused; the process dies in neither case."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(saved), thread, asked],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused" if precision.has_amx() else "ran", "True"]
