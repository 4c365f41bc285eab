"""Compiling a traced model with AOTInductor."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import attrs
import torch

from polyport.errors import ConfigError, ExportError
from polyport.pipeline import ExportedComponent, TracedProgram
from polyport_aoti.config import AotiConfig
from polyport_aoti.package import Package, compiled_for

STAGE = "lower"


def compile_program(traced: TracedProgram, config: AotiConfig) -> ExportedComponent:
    """Compile a traced model.

    Args:
        traced: The traced model; the compiler works on a copy of its graph.
        config: Options of the compiler.

    Returns:
        The package, in a temporary file that lives as long as it does.

    Raises:
        ConfigError: The compiler has no such option.
        ExportError: There is no C++ compiler, or the model can't be compiled.
    """
    _check_compiler()
    options = {
        # precompiling torch's headers pays off from about the tenth model on
        "aot_inductor.precompile_headers": False,
        # open axes start at 1 (a cache at 0), not at the 2 that torch.export assumes
        "aot_inductor.check_lowerbound": False,
        "max_autotune": config.max_autotune,
        **config.inductor_configs,
    }
    unknown = set(options) - set(torch._inductor.list_options())
    if unknown:
        raise ConfigError(
            f"torch._inductor has no option {', '.join(sorted(unknown))}.", stage=STAGE, backend="aoti"
        )
    folder = tempfile.mkdtemp(prefix="polyport-aoti-")
    package = Package(
        Path(folder, "model.pt2"), folder
    )  # from here on the folder goes with it, also after an error
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch._inductor.aoti_compile_and_package(
                traced.program, package_path=str(package.path), inductor_configs=options
            )
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ExportError(
            f"{traced.metadata.architecture} can't be compiled by AOTInductor (torch {torch.__version__}): "
            f"{type(error).__name__}: {' '.join(lines[:3])[:600]}",
            stage=STAGE,
            backend="aoti",
        ) from error
    metadata = attrs.evolve(traced.metadata, backend=dict(compiled_for(package.path)))
    return ExportedComponent(program=package, metadata=metadata)


def _check_compiler() -> None:
    """Find the C++ compiler before any work is done.

    Raises:
        ExportError: There is none.
    """
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError, RuntimeError) as error:
        raise ExportError(
            "AOTInductor needs a C++ compiler, and none was found. Install one (on Debian: apt install g++), or name yours "
            "in the environment variable CXX.",
            stage=STAGE,
            backend="aoti",
        ) from error
