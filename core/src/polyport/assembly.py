"""The stages of an export, for one module and one call."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from polyport.config import ExportConfig
from polyport.errors import ConfigError, ExportError
from polyport.patching import GraphFix, Patch, applied, in_window
from polyport.pipeline import ExportedComponent, TracedProgram
from polyport.session import Session

if TYPE_CHECKING:
    import torch


class Pipeline:
    """Exports one module from one call, to any number of formats, which share traces.

    Args:
        module: The model, or a part of it. It comes back unchanged, also after an error.
        inputs: Its forward kwargs; unchanged as well.
        pinned: Names of axes that keep the sample's size.
    """

    def __init__(
        self, module: torch.nn.Module, inputs: Mapping[str, Any], pinned: frozenset[str] = frozenset()
    ) -> None:
        self.model, self.inputs, self.pinned = module, inputs, pinned
        self._traces: dict[Any, TracedProgram] = {}

    def run(
        self, jobs: Iterable[tuple[Session, ExportConfig]]
    ) -> dict[str, tuple[ExportedComponent, Mapping[str, Any]]]:
        """Export to every format.

        Args:
            jobs: Session and config, per format.

        Returns:
            Format -> the component, and the prepared sample it was traced from.

        Raises:
            ExportError, ConfigError: Before any work where that is possible: the last format must not fail after
                minutes of the first.
        """
        jobs = list(jobs)
        for session, config in jobs:
            check(self.model, session, config)
        return {session.format: self._export(session, config) for session, config in jobs}

    def _export(self, session: Session, config: ExportConfig) -> tuple[ExportedComponent, Mapping[str, Any]]:
        traced = self._traced(session, config)
        quantized = session.quantize(traced, config, "graph")
        with applied(session.patches("lower", config), self.model) as active:
            component = session.lower(quantized, config)
        component = session.quantize(component, config, "program")
        metadata = attrs.evolve(
            component.metadata,
            packages={**component.metadata.packages, **_versions(session)},
            export_config=config.record(),
            patches=(*component.metadata.patches, *active),
        )
        return ExportedComponent(program=component.program, metadata=metadata), traced.call.sample

    def _traced(self, session: Session, config: ExportConfig) -> TracedProgram:
        patches = [patch for patch in session.patches("trace", config) if in_window(patch.affects)]
        key = (
            config.dynamic,
            id(config.dynamic_shapes),
            config.strict,
            config.prefer_deferred_runtime_asserts_over_guards,
            tuple(patch.id for patch in patches),
        )
        if key not in self._traces:
            self._traces[key] = self._trace(session, config, patches)
        return self._traces[key]

    def _trace(
        self, session: Session, config: ExportConfig, patches: Sequence[Patch | GraphFix]
    ) -> TracedProgram:
        with applied(patches, self.model) as active:
            traced = session.trace(session.capture(self.model, self.inputs, config, self.pinned), config)
        for fix in patches:
            if isinstance(fix, GraphFix) and fix.apply(traced.program):
                active.append(fix.id)
        metadata = attrs.evolve(traced.metadata, patches=(*traced.metadata.patches, *active))
        return attrs.evolve(traced, metadata=metadata)


def check(module: Any, session: Session, config: ExportConfig) -> None:
    """Refuse what can't work, before any work.

    Raises:
        ExportError: No module, or its parameters are of a dtype that the runtime can't compute with.
        ConfigError: The config is another format's.
    """
    import torch

    if not isinstance(module, torch.nn.Module):
        raise ExportError(
            f"Only a model (a transformers PreTrainedModel, or a module of one) can be exported, not "
            f"{type(module).__name__}."
        )
    info = session.backend
    if not isinstance(config, info.config_class):
        raise ConfigError(
            f"Format {session.format!r} takes a {info.config_class.__name__}, not a {type(config).__name__}."
        )
    device = next((parameter.device.type for parameter in module.parameters()), "cpu")
    allowed = info.runs_dtypes.get(device)
    if allowed is None:
        return
    dtypes = {str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.dtype.is_floating_point}
    if refused := sorted(dtypes - set(allowed)):
        raise ExportError(
            f"{type(module).__name__} has {', '.join(refused)} parameters, which the {session.format} runtime can't compute "
            f"with on {device}. Convert the model first, as in model.to(torch.{allowed[0]}); it can run "
            f"{', '.join(allowed)}.",
            stage="capture",
            backend=session.format,
        )


def _versions(session: Session) -> dict[str, str]:
    """Versions of what made the export: core, the plugin, and the packages the plugin names."""
    names = ["polyport", session.plugin.distribution, "torch", "transformers", *session.backend.packages]
    versions = {}
    for name in dict.fromkeys(names):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # run from a source tree: there is no version to record
    return versions
