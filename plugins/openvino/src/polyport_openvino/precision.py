"""Which precision a model is computed in, and the one combination of it with threads that ends the process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import openvino as ov
import torch

from polyport.errors import InputError
from polyport_openvino.devices import core, physical

_LOW = ("bf16", "f16")


def precision(model: ov.Model, properties: Mapping[str, Any]) -> str:
    """Name of the type that a CPU will compute matrix products in (`"f32"`, `"bf16"`).

    Args:
        model: The model.
        properties: What it is compiled with.
    """
    hint = _type_name(properties.get("INFERENCE_PRECISION_HINT"))
    if hint in _LOW:
        return hint
    mode = properties.get("EXECUTION_MODE_HINT")
    if hint is None and "PERFORMANCE" in str(mode).upper():
        chosen = _type_name(core().get_property("CPU", "INFERENCE_PRECISION_HINT"))
        if chosen in _LOW:
            return str(chosen)
    # types of the graph stay what they are where the CPU has instructions for them
    capable = {"bf16": "BF16", "f16": "FP16"}
    capabilities = core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    types = {
        output.get_element_type().get_type_name()
        for node in model.get_ordered_ops()
        for output in node.outputs()
    }
    return next((kind for kind in _LOW if kind in types and capable[kind] in capabilities), "f32")


def threads_per_stream(properties: Mapping[str, Any], cores: int) -> int:
    """How many threads at least compute one call.

    Args:
        properties: What a model is compiled with.
        cores: How many cores the process may use: OpenVINO takes no more, whatever it is told.
    """
    threads = min(_number(properties.get("INFERENCE_NUM_THREADS")) or cores, cores)
    if "THROUGHPUT" in str(properties.get("PERFORMANCE_HINT")).upper():
        return 1  # as many streams as there are cores, if it likes
    streams = properties.get("NUM_STREAMS")
    return threads // max(_number(streams), 1) if streams is None or _number(streams) else 1


def check_one_thread(model: ov.Model, device: str, properties: Mapping[str, Any], cores: int) -> None:
    """Refuse to compute in half precision with a single thread, where that would end the process.

    OpenVINO's matrix products on AMX divide the work among threads in a way that divides by zero for some sizes if there is only
    one: the process dies with SIGFPE while the model is compiled (https://github.com/openvinotoolkit/openvino/issues/33300).

    Args:
        model: The model.
        device: OpenVINO's name of the device.
        properties: What it is going to be compiled with.
        cores: How many cores the process may use.

    Raises:
        InputError: It would.
    """
    if not has_amx() or "CPU" not in physical(device) or threads_per_stream(properties, cores) > 1:
        return
    kind = precision(model, properties)
    if kind in _LOW:
        raise InputError(
            f"OpenVINO would compute this model in {kind} with a single thread, in which it may end the process on this CPU. Let "
            "it have two threads (INFERENCE_NUM_THREADS, NUM_STREAMS, torch_threads, the CPU affinity of the process), or compute "
            "in float32.",
            stage="run",
            backend="openvino",
        )


def has_amx() -> bool:
    """Whether the CPU has Intel's AMX; where PyTorch doesn't know, whether it may."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is None:
        return "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return bool(capabilities().get("amx_tile"))


def _type_name(value: Any) -> str | None:
    """`"bf16"` of a text or a type; None where the device may choose."""
    name = value.get_type_name() if isinstance(value, ov.Type) else str(value or "").lower()
    return None if name in ("", "dynamic", "undefined") else name


def _number(value: Any) -> int:
    try:
        return int(value or 0)
    except (TypeError, ValueError):
        return 0  # OpenVINO says what is wrong with it
