"""Devices and options of the runner."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import openvino as ov
import openvino.properties.hint as hint
import pytest
import torch

from polyport import ExportedModel
from polyport.errors import InputError
from polyport_openvino import compiling, devices


def _compiled(saved: Path, device: str | None = None, **options: Any) -> ov.CompiledModel:
    export = ExportedModel.from_pretrained(saved, device=device, **options)
    runner: Any = export.caller("model").runner
    return runner.compiled


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends other devices."""

    def pretend(*names: str) -> None:
        monkeypatch.setattr(devices, "available", lambda: names)

    return pretend


@pytest.mark.parametrize(
    "device", [None, "cpu", "CPU", "cpu:0", "AUTO", "auto", "AUTO:CPU", "HETERO:CPU", "MULTI:CPU"]
)
def test_devices_that_are_there(saved: Path, tiny_bert: Any, token_ids: Any, device: str | None) -> None:
    export = ExportedModel.from_pretrained(saved, device=device)
    for batch, length in ((1, 5), (3, 2)):
        inputs = token_ids(batch, length)
        with torch.no_grad():
            expected = tiny_bert(**inputs).last_hidden_state
        torch.testing.assert_close(export(**inputs).last_hidden_state, expected, atol=1e-5, rtol=0)
    assert export.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("there", "name", "expected"),
    [
        (("CPU",), None, "CPU"),
        (("CPU", "GPU"), None, "AUTO"),
        (("CPU", "GPU"), "cpu", "CPU"),
        (("CPU", "GPU"), "xpu", "GPU"),
        (("CPU", "GPU"), "xpu:0", "GPU.0"),
        (("CPU", "GPU.0", "GPU.1"), "xpu", "GPU"),
        (("CPU", "GPU.0", "GPU.1"), "xpu:1", "GPU.1"),
        (("CPU", "GPU.0", "GPU.1"), "GPU.1", "GPU.1"),
        (("CPU", "NPU"), "npu", "NPU"),
        (("CPU", "GPU"), "AUTO:GPU,CPU", "AUTO:GPU,CPU"),
        (("CPU", "GPU"), "AUTO:-GPU", "AUTO:-GPU"),
        (("CPU", "GPU"), "HETERO:GPU,CPU", "HETERO:GPU,CPU"),
        (("CPU", "GPU.0", "GPU.1"), "MULTI:GPU.1(4),CPU(2)", "MULTI:GPU.1(4),CPU(2)"),
    ],
)
def test_names(machine: Any, there: tuple[str, ...], name: str | None, expected: str) -> None:
    machine(*there)
    assert devices.device_name(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "cuda",
        "cuda:1",
        "mps",
        "xpu",
        "xpu:1",
        "GPU.1",
        "NPU",
        "AUTO:GPU,CPU",
        "HETERO:NPU",
        "MULTI:CPU,GPU",
        "toaster",
        "",
    ],
)
def test_device_that_is_not_there(saved: Path, token_ids: Any, machine: Any, name: str) -> None:
    machine("CPU")
    with pytest.raises(InputError, match=rf"OpenVINO can't run on '{name}' here\. Available devices: CPU;"):
        ExportedModel.from_pretrained(saved, device=name)(**token_ids(1, 3))


# ── options ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_unknown_option(saved: Path) -> None:
    with pytest.raises(InputError, match=r"no runner option 'confg'\. Valid options: config, torch_threads"):
        _compiled(saved, confg={})


def test_config_is_used(saved: Path) -> None:
    compiled = _compiled(saved, config={"PERF_COUNT": True, "INFERENCE_NUM_THREADS": 1})
    assert compiled.get_property("PERF_COUNT") in (True, "YES")
    assert compiled.get_property("INFERENCE_NUM_THREADS") == 1


def test_properties_of_openvinos_own(saved: Path) -> None:
    compiled = _compiled(saved, config={hint.performance_mode: hint.PerformanceMode.THROUGHPUT})
    assert "THROUGHPUT" in str(compiled.get_property("PERFORMANCE_HINT"))


def test_cache_of_compiled_models(saved: Path, token_ids: Any, tmp_path: Path) -> None:
    for _ in range(2):
        export = ExportedModel.from_pretrained(saved, config={"CACHE_DIR": str(tmp_path / "cache")})
        assert export(**token_ids(1, 3)).last_hidden_state.shape == (1, 3, 32)
    assert list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("device", ["cpu", "AUTO", "HETERO:CPU"])
def test_property_that_there_is_none(saved: Path, device: str) -> None:
    """AUTO would ignore it without a word."""
    with pytest.raises(
        InputError, match=r"no property 'INFERENCE_NUM_THREAD' for .*Did you mean INFERENCE_NUM_THREADS"
    ):
        _compiled(saved, device, config={"INFERENCE_NUM_THREAD": 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("INFERENCE_NUM_THREADS", "many"),
        ("INFERENCE_NUM_THREADS", -3),
        ("INFERENCE_PRECISION_HINT", "f64"),
        ("PERFORMANCE_HINT", "FAST"),
        ("EXECUTION_MODE_HINT", "FAST"),
        ("NUM_STREAMS", object()),
        ("INFERENCE_NUM_THREADS", None),
    ],
)
def test_value_that_a_property_cannot_have(saved: Path, name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name) as caught:
        _compiled(saved, config={name: value})
    assert ".cpp" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_config_that_is_no_mapping(saved: Path) -> None:
    with pytest.raises(
        InputError, match="config must map properties of OpenVINO to values, not be of type list"
    ):
        _compiled(saved, config=["PERF_COUNT"])


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", True])
def test_torch_threads_that_are_none(saved: Path, threads: Any) -> None:
    with pytest.raises(InputError, match="torch_threads must be a positive number of threads"):
        _compiled(saved, torch_threads=threads)


def test_torch_threads(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(compiling, "cores", lambda: 8)

    def check(model: Any, device: str, properties: Any, cores: int) -> None:
        seen.append(dict(properties))

    monkeypatch.setattr(compiling, "check_one_thread", check)
    try:
        for threads, config, expected in (
            (3, None, 5),
            (8, None, 1),
            (9, None, 1),
            (1, {"INFERENCE_NUM_THREADS": 2}, 2),
        ):
            _compiled(saved, torch_threads=threads, config=config)
            assert torch.get_num_threads() == threads
            assert seen[-1]["INFERENCE_NUM_THREADS"] == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system pins no processes")
def test_cores_of_a_pinned_process() -> None:
    code = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from polyport_openvino.compiling import cores
print(cores())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "1"
