"""Running an ONNX model with ONNX Runtime."""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime as ort
import torch

from polyport.errors import ArtifactError, ExportError, InputError
from polyport.metadata import ExportMetadata
from polyport.pipeline import RunRequest
from polyport_dynamo.lowering import Leaves
from polyport_onnx.artifact import save_models, source_of
from polyport_onnx.binding import BoundRuns
from polyport_onnx.overwrite import may_overwrite

#: Optimisations that cost time on the CPU provider: its fused SkipLayerNormalization takes longer than the
#: LayerNormalization and Add it replaces (8 to 22 % of a MiniLM call; `benchmarks/session_options.py` measures it).
_SLOWER_ON_CPU = ["SkipLayerNormFusion"]


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
        ArtifactError: The model is not the one that the record describes.
    """

    def __init__(self, model: ir.Model, metadata: ExportMetadata, request: RunRequest) -> None:
        options = request.take(providers=None, session_options=None)
        device = _torch_device(request.device)
        wanted = options["providers"]
        providers = _checked_providers(wanted) if wanted else _providers(device)
        self.session = _opened(model, _checked_options(options["session_options"]), providers)
        active = self.session.get_providers()
        if (
            not wanted
            and (first := providers[0] if isinstance(providers[0], str) else providers[0][0]) not in active
        ):
            # ONNX Runtime only warns, and computes on the CPU instead
            raise InputError(
                f"{first} can't be used here: ONNX Runtime fell back to {', '.join(active)}.", stage="run"
            )
        on_gpu = device.type == "cuda" and "CUDAExecutionProvider" in active
        self.device = f"cuda:{device.index or 0}" if on_gpu else "cpu"
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        leaves = Leaves.of(metadata)
        ours = leaves.graph_names()
        self._inputs = _in_order([value.name for value in inputs], ours[0], leaves.inputs, "takes")
        self._outputs = _in_order([value.name for value in outputs], ours[1], leaves.computed, "returns")
        position = {name: index for index, name in enumerate(leaves.inputs)}
        changed = {position[name]: len(leaves.computed) + i for i, name in enumerate(leaves.in_place)}
        aside = [
            source
            for source, result in changed.items()
            if not may_overwrite(
                _named(model.graph.outputs, self._outputs[result]),
                _named(model.graph.inputs, self._inputs[source]),
            )
        ]
        computed = iter(range(len(leaves.computed)))
        #: For every output of the model, which of the session's it is, or which input (counted from -1 down).
        self._returned = [
            ~position[leaves.passed_through[name]] if name in leaves.passed_through else next(computed)
            for name in leaves.outputs
        ]
        # numpy has no bfloat16, and knows nothing of a GPU; otherwise arrays are shared in less time than tensors are bound
        self._bound = (
            on_gpu or bool(changed) or any(value.type == "tensor(bfloat16)" for value in (*inputs, *outputs))
        )
        #: Runs with inputs and outputs bound by address: nothing is copied, on whatever device it lies.
        self._run_bound = BoundRuns(self.session, self._inputs, self._outputs, self.device, changed, aside)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the graph once (see `polyport.pipeline.Runner`).

        Inputs that the record lists as changed in place are: the session writes into their memory.
        """
        results: Sequence[Any] = self._run_bound(inputs) if self._bound else self._run_arrays(inputs)
        return [results[i] if i >= 0 else inputs[~i] for i in self._returned]

    def _run_arrays(self, inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        feeds = {name: tensor.numpy() for name, tensor in zip(self._inputs, inputs, strict=True)}
        return [torch.from_numpy(array) for array in self.session.run(self._outputs, feeds)]


def _named(values: Sequence[ir.Value], name: str) -> ir.Value:
    return next(value for value in values if value.name == name)


def _in_order(graph: list[str], ours: Sequence[str], recorded: Sequence[str], verb: str) -> list[str]:
    """Names in the graph, in the order of the export's record.

    Args:
        graph: What the graph has.
        ours: Names that we give to what is recorded.
        recorded: Names of the leaves.
        verb: Whether the graph takes or returns them, for the message.
    """
    for names in (ours, recorded):
        if len(names) == len(ours) and set(graph) == set(names):
            return list(names)
    if len(graph) != len(ours):
        raise ArtifactError(
            f"The graph {verb} {', '.join(graph)}, the export's metadata names {', '.join(recorded)}.",
            stage="load",
            backend="onnx",
        )
    return graph  # another tool's names, in the same order


# ── sessions ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _torch_device(name: str | None) -> torch.device:
    try:
        return torch.device(name or "cpu")
    except RuntimeError as error:
        raise InputError(f"{name!r} is no device: {str(error).splitlines()[0]}", stage="run") from error


def _providers(device: torch.device) -> list[Any]:
    """The providers for a device, and the CPU's for what they don't have."""
    if device.type == "cpu":
        return ["CPUExecutionProvider"]
    name, options = {
        "cuda": ("CUDAExecutionProvider", {"device_id": str(device.index or 0)}),
        "xpu": ("OpenVINOExecutionProvider", {"device_type": "GPU"}),
    }.get(device.type, (None, {}))
    available = ort.get_available_providers()
    if name not in available:
        raise InputError(
            f"ONNX Runtime can't run on {str(device)!r} here. Available providers: {', '.join(available)}. Other "
            "providers come with other distributions of it (onnxruntime-gpu, onnxruntime-openvino).",
            stage="run",
        )
    return [(name, options), "CPUExecutionProvider"]


def _checked_providers(wanted: Any) -> list[Any]:
    providers = [wanted] if isinstance(wanted, str) else list(wanted)
    known = ort.get_available_providers()
    for provider in providers:
        name = provider if isinstance(provider, str) else provider[0]
        if name not in known:
            raise InputError(
                f"ONNX Runtime has no provider {name!r} here, only {', '.join(known)}.", stage="run"
            )
    return providers


def _checked_options(options: Any) -> ort.SessionOptions:
    if options is None:
        options = ort.SessionOptions()
        # its warnings speak of the graph's internals, to people who did not write it
        options.log_severity_level = 3
    if not isinstance(options, ort.SessionOptions):
        raise InputError(
            f"session_options must be an onnxruntime.SessionOptions, not {type(options).__name__}.",
            stage="run",
        )
    return options


def _opened(model: ir.Model, options: ort.SessionOptions, providers: Sequence[Any]) -> ort.InferenceSession:
    source = source_of(model)
    if source is not None:
        return _session(source, options, providers)
    # a mapped file can't be deleted on every system: what is left then is the system's to clear
    with tempfile.TemporaryDirectory(prefix="polyport-onnx-", ignore_cleanup_errors=True) as folder:
        save_models({"model": model}, Path(folder))
        return _session(Path(folder, "model.onnx"), options, providers)


def _session(path: Path, options: ort.SessionOptions, providers: Sequence[Any]) -> ort.InferenceSession:
    """A session of its own for every component, with its own copy of the weights in memory, also of shared ones.

    ONNX Runtime's Python interface has no container for packed weights, and weights that are shared as they are must stay
    unpacked (`session.disable_prepacking`), which makes a token 20 to 50 % slower (SmolLM2's matrices: 17 to 19 ms, not 12 to
    14).
    """
    slower = _SLOWER_ON_CPU if list(providers) == ["CPUExecutionProvider"] else []
    try:
        session = ort.InferenceSession(
            str(path), options, providers=list(providers), disabled_optimizers=slower
        )
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ExportError(
            f"ONNX Runtime {ort.__version__} can't load the graph: {reason}", stage="run", backend="onnx"
        ) from error
    _give_back_freed_memory()
    return session


def _give_back_freed_memory() -> None:
    """Hand what a session freed while it opened (weights before they were packed) back to the system.

    glibc keeps it otherwise: a quarter of the weights, for a model of 135 million parameters.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
