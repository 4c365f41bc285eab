"""Hooks of the executorch backend, in pipeline order.

Product: an `executorch.exir.ExecutorchProgramManager`, saved as `model.pte`; loaded, it is an `executorch.runtime.Program`. The model
is traced by the dynamo backend, which this one builds on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyport.markers import hookimpl
from polyport.pipeline import (
    BackendInfo,
    CapturedCall,
    ExportedComponent,
    Runner,
    RunRequest,
    TracedProgram,
)
from polyport_executorch.config import ExecutorchConfig

if TYPE_CHECKING:
    from executorch.runtime import Program


@hookimpl
def polyport_backend() -> BackendInfo:
    return BackendInfo(
        format="executorch",
        config_class=ExecutorchConfig,
        exporter="ExecutorchExporter",
        suffix=".pte",
        summary="ExecuTorch programs, for phones and other small devices",
        builds_on=("dynamo",),
        packages={"executorch": ">=1.4.1,<1.5"},
        tested={"executorch": "1.4.1"},
    )


@hookimpl
def polyport_capture(model: Any, inputs: Mapping[str, Any], config: ExecutorchConfig) -> CapturedCall | None:
    from polyport_executorch.recipes import check_call

    check_call(config.backend, model, inputs)
    return None


@hookimpl
def polyport_lower(traced: TracedProgram, config: ExecutorchConfig) -> ExportedComponent:
    from polyport_executorch.component import to_component

    return to_component(traced, config)


@hookimpl
def polyport_save(
    components: Mapping[str, ExportedComponent], directory: Path
) -> Mapping[str, Sequence[str]]:
    from polyport_executorch.artifact import save_programs

    return save_programs({name: component.program for name, component in components.items()}, directory)


@hookimpl
def polyport_load(name: str, files: Sequence[Path]) -> Program:
    from polyport_executorch.artifact import load_program

    return load_program(files[0], name)


@hookimpl
def polyport_run(component: ExportedComponent, request: RunRequest) -> Runner:
    from polyport_executorch.kept import kept_leaves_of
    from polyport_executorch.runner import ProgramRunner
    from polyport_executorch.stateful_runner import StatefulRunner

    if kept_leaves_of(component.metadata):
        return StatefulRunner(component.program, component.metadata, request)
    return ProgramRunner(component.program, component.metadata, request)


@hookimpl
def polyport_describe(component: ExportedComponent) -> Mapping[str, Any]:
    from polyport_executorch.delegation import described

    return described(component.metadata)
