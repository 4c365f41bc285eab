"""Hooks of the aoti backend, in pipeline order.

Product: a package of machine code (https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html), compiled for the
device that the model is on and for this machine's processor. The model is traced by the dynamo backend, which this one
builds on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyport.markers import hookimpl
from polyport.metadata import ExportMetadata
from polyport.pipeline import BackendInfo, ExportedComponent, Runner, RunRequest, TracedProgram
from polyport_aoti.config import AotiConfig

if TYPE_CHECKING:
    from polyport_aoti.package import Package


@hookimpl
def polyport_backend() -> BackendInfo:
    return BackendInfo(
        format="aoti",
        config_class=AotiConfig,
        exporter="AotiExporter",
        suffix=".pt2",
        summary="compiled ahead of time by AOTInductor, run by PyTorch (an example of a third party's backend)",
        builds_on=("dynamo",),
        packages={"torch": ">=2.12"},
        tested={"torch": "2.13.0"},
    )


@hookimpl
def polyport_lower(traced: TracedProgram, config: AotiConfig) -> ExportedComponent:
    from polyport_aoti.compiling import compile_program

    return compile_program(traced, config)


@hookimpl
def polyport_save(
    components: Mapping[str, ExportedComponent], directory: Path
) -> Mapping[str, Sequence[str]]:
    return {
        name: (component.program.copy_to(directory / f"{name}.pt2"),)
        for name, component in components.items()
    }


@hookimpl
def polyport_load(files: Sequence[Path], metadata: ExportMetadata, trust: bool) -> Package:
    from polyport_aoti.package import load_package

    return load_package(files[0], metadata, trust=trust)


@hookimpl
def polyport_run(component: ExportedComponent, request: RunRequest) -> Runner:
    from polyport_aoti.runner import PackageRunner

    return PackageRunner(component.program, request)


@hookimpl
def polyport_describe(component: ExportedComponent) -> Mapping[str, Any]:
    package: Package = component.program
    return package.describe()
