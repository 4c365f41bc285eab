"""Hooks of the openvino backend, in pipeline order.

Product: an `openvino.Model`, saved as OpenVINO IR: `openvino_model.xml` with its weights in `openvino_model.bin`. The model is
traced by the dynamo backend, which this one builds on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyport.markers import hookimpl
from polyport.metadata import ExportMetadata
from polyport.pipeline import BackendInfo, ExportedComponent, Runner, RunRequest, TracedProgram
from polyport_openvino.config import OpenVINOConfig

if TYPE_CHECKING:
    import openvino


@hookimpl
def polyport_backend() -> BackendInfo:
    return BackendInfo(
        format="openvino",
        config_class=OpenVINOConfig,
        exporter="OpenVINOExporter",
        suffix=".xml",
        summary="OpenVINO IR, run by OpenVINO on Intel CPUs, GPUs and NPUs",
        companions=("{stem}.bin",),
        builds_on=("dynamo",),
        packages={"openvino": ">=2026.3,<2027"},
        tested={"openvino": "2026.4.1"},
    )


@hookimpl
def polyport_lower(traced: TracedProgram, config: OpenVINOConfig) -> ExportedComponent:
    from polyport_openvino.component import to_component

    return to_component(traced, config)


@hookimpl
def polyport_save(
    components: Mapping[str, ExportedComponent], directory: Path
) -> Mapping[str, Sequence[str]]:
    from polyport_openvino.artifact import save_models

    return save_models({name: component.program for name, component in components.items()}, directory)


@hookimpl
def polyport_load(files: Sequence[Path], metadata: ExportMetadata, trust: bool) -> openvino.Model:
    from polyport_openvino.artifact import load_model

    return load_model(files)


@hookimpl
def polyport_run(component: ExportedComponent, request: RunRequest) -> Runner:
    from polyport_openvino.runner import ModelRunner
    from polyport_openvino.stateful import variables_of
    from polyport_openvino.stateful_runner import StatefulRunner

    if variables_of(component.metadata):
        return StatefulRunner(component.program, component.metadata, request)
    return ModelRunner(component.program, component.metadata, request)


@hookimpl
def polyport_describe(component: ExportedComponent) -> Mapping[str, Any]:
    from polyport_openvino.artifact import describe_model

    return describe_model(component.program)
