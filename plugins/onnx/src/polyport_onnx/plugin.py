"""Hooks of the onnx backend, in pipeline order.

Product: an `onnx_ir.Model` (https://onnx.ai/ir-py), saved as `model.onnx` with its weights in `model.onnx.data`, or, where an
export has several components, in one file for all. The model is traced by the dynamo backend, which this one builds on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyport.markers import hookimpl
from polyport.metadata import ExportMetadata
from polyport.pipeline import BackendInfo, ExportedComponent, Runner, RunRequest, TracedProgram
from polyport_onnx.config import OnnxConfig

if TYPE_CHECKING:
    import onnx_ir

#: dtypes of parameters that ONNX Runtime's CPU provider has kernels for. It loads no graph with bfloat16 arithmetic
#: (https://github.com/microsoft/onnxruntime/issues/25740), and has too few kernels for float64 (none for Erf, so no GELU).
_CPU_DTYPES = ("float32", "float16")


@hookimpl
def polyport_backend() -> BackendInfo:
    return BackendInfo(
        format="onnx",
        config_class=OnnxConfig,
        exporter="OnnxExporter",
        suffix=".onnx",
        summary="ONNX graphs, run by ONNX Runtime",
        companions=("{file}.data",),
        builds_on=("dynamo",),
        packages={
            "onnx": ">=1.20,<2",
            "onnx-ir": ">=1.0,<2",
            "onnxscript": ">=0.7,<1",
            "onnxruntime": ">=1.27,<2",
        },
        tested={"onnx": "1.23.2", "onnx-ir": "1.1.0", "onnxscript": "0.7.2", "onnxruntime": "1.32.0"},
        runs_dtypes={"cpu": _CPU_DTYPES},
    )


@hookimpl
def polyport_lower(traced: TracedProgram, config: OnnxConfig) -> ExportedComponent:
    from polyport_onnx.component import to_component

    return to_component(traced, config)


@hookimpl
def polyport_save(
    components: Mapping[str, ExportedComponent], directory: Path
) -> Mapping[str, Sequence[str]]:
    from polyport_onnx.artifact import save_models

    return save_models({name: component.program for name, component in components.items()}, directory)


@hookimpl
def polyport_load(files: Sequence[Path], metadata: ExportMetadata, trust: bool) -> onnx_ir.Model:
    from polyport_onnx.artifact import load_model

    return load_model(files, trust=trust)


@hookimpl
def polyport_run(component: ExportedComponent, request: RunRequest) -> Runner:
    from polyport_onnx.runner import SessionRunner

    return SessionRunner(component.program, component.metadata, request)


@hookimpl
def polyport_describe(component: ExportedComponent) -> Mapping[str, Any]:
    from polyport_onnx.artifact import describe_model

    return describe_model(component.program)
