"""Hooks of the dynamo backend, in pipeline order.

Product: a `torch.export.ExportedProgram` (https://docs.pytorch.org/docs/stable/export.html), which other backends build on
too. The traced graph is the program; there is nothing to lower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyport.config import ExportConfig
from polyport.hookspecs import PatchStage
from polyport.markers import hookimpl
from polyport.metadata import ExportMetadata
from polyport.patching import GraphFix, Patch
from polyport.pipeline import BackendInfo, CapturedCall, ExportedComponent, Runner, RunRequest, TracedProgram
from polyport_dynamo.config import DynamoConfig

if TYPE_CHECKING:
    import torch


@hookimpl
def polyport_backend() -> BackendInfo:
    return BackendInfo(
        format="dynamo",
        config_class=DynamoConfig,
        exporter="DynamoExporter",
        suffix=".pt2",
        summary="torch.export programs, run by PyTorch",
        packages={"torch": ">=2.12,<3"},
        tested={"torch": "2.13.0"},
    )


@hookimpl
def polyport_patch(stage: PatchStage, config: ExportConfig) -> Sequence[Patch | GraphFix]:
    if stage != "trace":
        return ()
    from polyport_dynamo.fixes import PATCHES

    return PATCHES


@hookimpl
def polyport_trace(call: CapturedCall, config: ExportConfig) -> TracedProgram:
    from polyport_dynamo.tracing import trace

    return trace(call, config)


@hookimpl
def polyport_lower(traced: TracedProgram, config: ExportConfig) -> ExportedComponent:
    return ExportedComponent(program=traced.program, metadata=traced.metadata)


@hookimpl
def polyport_save(
    components: Mapping[str, ExportedComponent], directory: Path
) -> Mapping[str, Sequence[str]]:
    from polyport_dynamo.archive import save_programs

    return save_programs({name: component.program for name, component in components.items()}, directory)


@hookimpl
def polyport_load(
    files: Sequence[Path], metadata: ExportMetadata, trust: bool
) -> torch.export.ExportedProgram:
    from polyport_dynamo.archive import load_program

    return load_program(files[0], trust=trust, beside=files[1:])


@hookimpl
def polyport_run(component: ExportedComponent, request: RunRequest) -> Runner:
    from polyport_dynamo.runner import ProgramRunner

    request.take()
    return ProgramRunner(component.program, component.metadata, request.device)


@hookimpl
def polyport_describe(component: ExportedComponent) -> Mapping[str, Any]:
    from polyport_dynamo.archive import count_operators

    return {"operators": count_operators(component.program)}
