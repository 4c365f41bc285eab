"""Running an ONNX model with ONNX Runtime."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from polyport.errors import ExportError, InputError
from polyport.metadata import ExportMetadata
from polyport.pipeline import RunRequest

from polyport_onnx.artifact import SOURCE, save_model

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "xpu": "OpenVINOExecutionProvider"}


class SessionRunner:
    """Executes one model in an ONNX Runtime session, which any number of threads may share.

    Args:
        model: The model. One that was loaded is read again from its file, which ONNX Runtime maps; one that was just
            exported goes through a temporary file.
        metadata: The record of the model.
        request: Device and options: `providers` (as `onnxruntime.InferenceSession` takes them, in place of the device's)
            and `session_options` (an `onnxruntime.SessionOptions`).

    Raises:
        InputError: The device or a provider is not available.
        ExportError: ONNX Runtime can't load the model.
    """

    def __init__(self, model: ir.Model, metadata: ExportMetadata, request: RunRequest) -> None:
        options = request.take(providers=None, session_options=None)
        device = torch.device(request.device or "cpu")
        providers = options["providers"] or _providers(device)
        source: Path | None = model.meta.get(SOURCE)
        if source is not None:
            self.session = _session(source, options["session_options"], providers)
        else:
            with tempfile.TemporaryDirectory(prefix="polyport-onnx-") as folder:
                save_model(model, Path(folder, "model.onnx"))
                self.session = _session(Path(folder, "model.onnx"), options["session_options"], providers)
        on_gpu = device.type != "cpu" and "CUDAExecutionProvider" in self.session.get_providers()
        self.device = f"cuda:{device.index or 0}" if on_gpu else "cpu"
        self._inputs = [value.name for value in self.session.get_inputs()]
        self._outputs = [value.name for value in self.session.get_outputs()]
        if len(self._inputs) != len(metadata.inputs):
            raise ExportError(
                f"The graph takes {', '.join(self._inputs)}, the export's metadata names {', '.join(metadata.input_names)}.",
                stage="run",
                backend="onnx",
            )
        # numpy has no bfloat16, and knows nothing of a GPU: such tensors are bound by address
        dtypes = {info.dtype for info in (*metadata.inputs, *metadata.outputs)}
        self._bound = on_gpu or "bfloat16" in dtypes

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the graph once (see `polyport.pipeline.Runner`)."""
        if self._bound:
            return self._run_bound(inputs)
        feeds = {name: tensor.numpy() for name, tensor in zip(self._inputs, inputs, strict=True)}
        return [torch.from_numpy(array) for array in self._run(feeds)]

    def _run(self, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        arrays: list[np.ndarray] = self.session.run(self._outputs, feeds)
        return arrays

    def _run_bound(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run with inputs and outputs bound by address: nothing is copied, on whatever device it lies."""
        binding = self.session.io_binding()
        for name, tensor in zip(self._inputs, inputs, strict=True):
            binding.bind_ortvalue_input(name, _ort_value(tensor))
        kind, _, index = self.device.partition(":")
        for name in self._outputs:
            binding.bind_output(name, kind, int(index or 0))
        binding.synchronize_inputs()
        self.session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return [_tensor(value) for value in binding.get_outputs()]


def _providers(device: torch.device) -> list[Any]:
    name = _PROVIDERS.get(device.type)
    available = ort.get_available_providers()
    if name not in available:
        raise InputError(
            f"ONNX Runtime can't run on {str(device)!r} here. Available providers: {', '.join(available)}. Other "
            "providers come with other distributions of it (onnxruntime-gpu, onnxruntime-openvino).",
            stage="run",
        )
    if device.type == "cpu":
        return [name]
    return [(name, {"device_id": str(device.index or 0)}), "CPUExecutionProvider"]


def _session(path: Path, session_options: Any, providers: Sequence[Any]) -> ort.InferenceSession:
    options = session_options or ort.SessionOptions()
    if session_options is None:
        options.log_severity_level = 3  # its warnings speak of the graph's internals, to people who did not write it
    known = set(ort.get_available_providers())
    for provider in providers:
        name = provider if isinstance(provider, str) else provider[0]
        if name not in known:
            raise InputError(
                f"ONNX Runtime has no provider {name!r} here, only {', '.join(sorted(known))}.", stage="run"
            )
    try:
        return ort.InferenceSession(str(path), options, providers=list(providers))
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ExportError(f"ONNX Runtime {ort.__version__} can't load the graph: {reason}", stage="run", backend="onnx") from error


def _ort_value(tensor: torch.Tensor) -> ort.OrtValue:
    if tensor.dtype is torch.bool:  # DLPack has no bool that both sides agree on
        return ort.OrtValue(ort.capi._pybind_state.OrtValue.from_dlpack(tensor.view(torch.uint8).__dlpack__(), True))
    return ort.OrtValue(ort.capi._pybind_state.OrtValue.from_dlpack(tensor.__dlpack__(), False))


def _tensor(value: ort.OrtValue) -> torch.Tensor:
    tensor = torch.from_dlpack(value._ortvalue.to_dlpack())
    return tensor.view(torch.bool) if value.data_type() == "tensor(bool)" else tensor
