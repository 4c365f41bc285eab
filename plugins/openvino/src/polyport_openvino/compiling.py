"""Compiling a model for a device: options, precision, threads."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

import openvino as ov
import torch

from polyport.errors import ExportError, InputError
from polyport.pipeline import RunRequest
from polyport_openvino.devices import core, device_name, physical
from polyport_openvino.messages import reason
from polyport_openvino.precision import check_one_thread

#: Properties that the core itself takes, for any device.
_OF_THE_CORE = frozenset(
    {"CACHE_DIR", "CACHE_MODE", "ENABLE_MMAP", "DEVICE_PROPERTIES", "AUTO_BATCH_TIMEOUT"}
)


def compile_model(model: ov.Model, request: RunRequest, **defaults: Any) -> ov.CompiledModel:
    """Compile a model for the device and with the options of a request.

    A model computes in the precision it was exported in, unless `config` asks for another one: OpenVINO by itself would compute a
    float32 model in bfloat16 and keep caches in 8 bits wherever the CPU can.

    Args:
        model: The model.
        request: Device and options: `config` (properties of OpenVINO's) and `torch_threads` (how many threads PyTorch keeps; the
            other cores are OpenVINO's).
        **defaults: Other options that the runner takes.

    Raises:
        InputError: The device, an option or a property is not available.
        ExportError: OpenVINO can't compile the model.
    """
    options = request.take(config=None, torch_threads=None, **defaults)
    device = device_name(request.device)
    config = checked_config(device, options["config"])
    threads = _checked_threads(options["torch_threads"])
    if threads is not None:
        torch.set_num_threads(threads)
        if "CPU" in physical(device):
            config.setdefault("INFERENCE_NUM_THREADS", max(1, cores() - threads))
    # keeps the types of the graph, and caches and activations at full precision
    properties = {"EXECUTION_MODE_HINT": "ACCURACY", **config}
    check_one_thread(model, device, properties, cores())
    try:
        return core().compile_model(model, device, properties)
    except (RuntimeError, TypeError) as error:
        said = reason(error)
        for name, value in config.items():
            if name in said:
                raise InputError(
                    f"OpenVINO refuses {value!r} for the property {name!r}: {said}",
                    stage="run",
                    backend="openvino",
                ) from error
        raise ExportError(
            f"OpenVINO {ov.get_version().partition('-')[0]} can't compile the graph for {device}: {said}",
            stage="run",
            backend="openvino",
        ) from error


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def checked_config(device: str, config: Any) -> dict[str, Any]:
    """The properties that a user asks for.

    Args:
        device: OpenVINO's name of the device.
        config: What was given.

    Raises:
        InputError: It is no mapping, or holds a property that the device doesn't have: AUTO and others ignore those.
    """
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise InputError(
            f"config must map properties of OpenVINO to values, not be of type {type(config).__name__}.",
            stage="run",
        )
    known = _properties(device)
    checked: dict[str, Any] = {}
    for key, value in config.items():
        name = str(key)
        if name not in known:
            close = difflib.get_close_matches(name.upper(), known, n=3, cutoff=0.5)
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
            raise InputError(
                f"OpenVINO has no property {name!r} for {device}.{hint}", stage="run", backend="openvino"
            )
        # OpenVINO takes any object, and leaves out what it can't read
        if not isinstance(value, (str, bool, int, float, Mapping)) and not type(value).__module__.startswith(
            "openvino"
        ):
            raise InputError(
                f"The property {name!r} can't be {value!r}: OpenVINO takes texts, numbers and values of its own.",
                stage="run",
                backend="openvino",
            )
        checked[name] = value
    return checked


def _properties(device: str) -> frozenset[str]:
    """Names of the properties that may be set for a device."""
    found = set(_OF_THE_CORE)
    for name in {device.partition(":")[0], *physical(device)}:
        supported = core().get_property(name, "SUPPORTED_PROPERTIES")
        found |= {str(key) for key, access in supported.items() if str(access) != "RO"}
    return frozenset(found)


def _checked_threads(threads: Any) -> int | None:
    if threads is None:
        return None
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise InputError(f"torch_threads must be a positive number of threads, not {threads!r}.", stage="run")
    return threads
