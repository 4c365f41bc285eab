"""Exporting: the pipeline, and the classes and functions that start it."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import attrs

from polyport import discovery
from polyport.artifact import ExportedModel
from polyport.config import ExportConfig
from polyport.errors import BackendContractError, ConfigError, ExportError
from polyport.patching import GraphFix, Patch, applied, in_window
from polyport.pipeline import ExportedComponent, TracedProgram
from polyport.session import Session

logger = logging.getLogger(__name__)

#: Name of the component of a one-graph export.
MODEL = "model"


def export(
    model: Any,
    inputs: Mapping[str, Any],
    configs: Sequence[ExportConfig | Mapping[str, Any]],
    *,
    plugins: Sequence[Any] = (),
) -> dict[str, ExportedModel]:
    """Export one model to several formats, tracing it once where their configs allow it.

    Args:
        model: A `PreTrainedModel`. It comes back unchanged, also after an error.
        inputs: Sample forward kwargs; unchanged as well.
        configs: One config (or dict with `export_format`) per format.
        plugins: More hook implementations for this call, such as `polyport.progress.Progress`.

    Returns:
        Format -> export, in the order of `configs`.

    Raises:
        ExportError: The model or the inputs can't be exported; the message says where and why.
    """
    checked = [
        AutoExportConfig.from_dict(config) if isinstance(config, Mapping) else config for config in configs
    ]
    formats = [config.export_format for config in checked]
    if not formats:
        raise ConfigError("There is nothing to export to: `configs` is empty.")
    if len(set(formats)) != len(formats):
        raise ConfigError(f"A format may be given once, not as in {', '.join(formats)}.")
    jobs = [(Session(config.export_format, plugins), config) for config in checked]
    return _Pipeline(model, inputs).run(jobs)


class _Pipeline:
    """The stages of an export for one model and one call, with the traces they share."""

    def __init__(self, model: Any, inputs: Mapping[str, Any]) -> None:
        self.model, self.inputs = model, inputs
        self._traces: dict[Any, TracedProgram] = {}

    def run(self, jobs: Iterable[tuple[Session, ExportConfig]]) -> dict[str, ExportedModel]:
        jobs = list(jobs)
        # before any work: the last format must not fail after minutes of the first
        for session, config in jobs:
            _check(self.model, session, config)
        return {session.format: self._export(session, config) for session, config in jobs}

    def _export(self, session: Session, config: ExportConfig) -> ExportedModel:
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
        return ExportedModel(
            session.format,
            {MODEL: ExportedComponent(program=component.program, metadata=metadata)},
            config=self.model.config,
            generation_config=getattr(self.model, "generation_config", None),
            sample=traced.call.sample,
            session=session,
        )

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
            traced = session.trace(session.capture(self.model, self.inputs, config), config)
        for fix in patches:
            if isinstance(fix, GraphFix) and fix.apply(traced.program):
                active.append(fix.id)
        metadata = attrs.evolve(traced.metadata, patches=(*traced.metadata.patches, *active))
        return attrs.evolve(traced, metadata=metadata)


def _check(model: Any, session: Session, config: ExportConfig) -> None:
    """Refuse what can't work, before any work.

    Raises:
        ExportError: Not a model, or its parameters are of a dtype that the runtime can't compute with.
        ConfigError: The config is another format's.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ExportError(f"Only a transformers PreTrainedModel can be exported, not {type(model).__name__}.")
    info = session.backend
    if not isinstance(config, info.config_class):
        raise ConfigError(
            f"Format {session.format!r} takes a {info.config_class.__name__}, not a {type(config).__name__}."
        )
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    allowed = info.runs_dtypes.get(device)
    if allowed is None:
        return
    dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.dtype.is_floating_point}
    if refused := sorted(dtypes - set(allowed)):
        raise ExportError(
            f"{type(model).__name__} has {', '.join(refused)} parameters, which the {session.format} runtime can't compute "
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


class HfExporter:
    """Exports to one format. Each backend has a subclass that names its format (`OnnxExporter`...)."""

    #: The format; set by subclasses.
    export_format: ClassVar[str] = ""

    def export(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        config: ExportConfig | Mapping[str, Any] | None = None,
        *,
        plugins: Sequence[Any] = (),
    ) -> ExportedModel:
        """Export one model.

        Args:
            model: A `PreTrainedModel`. It comes back unchanged, also after an error.
            inputs: Sample forward kwargs, or a tokenizer's `BatchEncoding`; unchanged as well.
            config: The format's config, or a dict of its options; its defaults when left out.
            plugins: More hook implementations for this call.

        Returns:
            The export, with the one component `"model"`.

        Raises:
            ExportError: The model or the inputs can't be exported; the message says where and why.
        """
        session = Session(self.export_format, plugins)
        if config is None:
            config = session.backend.config_class()
        elif isinstance(config, Mapping):
            config = session.backend.config_class.from_dict(config)
        return _Pipeline(model, inputs).run([(session, config)])[self.export_format]


class AutoExportConfig:
    """Finds the config class of a format among the installed backends."""

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ExportConfig:
        """Build the config of the format that `export_format` names.

        Raises:
            ConfigError: `export_format` is missing, or an option is wrong.
            BackendNotInstalled: No installed backend has that format; the message lists those that are.
        """
        if "export_format" not in values:
            formats = ", ".join(sorted({plugin.name for plugin in discovery.installed()})) or "none"
            raise ConfigError(f"The config needs the key 'export_format' (installed formats: {formats}).")
        return Session(values["export_format"]).backend.config_class.from_dict(values)


class AutoHfExporter:
    """Finds the exporter of a config's format."""

    @staticmethod
    def from_config(config: ExportConfig | Mapping[str, Any]) -> HfExporter:
        """The exporter of the config's format.

        Raises:
            BackendNotInstalled: No installed backend has that format; the message lists those that are.
            BackendContractError: The backend's package lacks the exporter class that it names.
        """
        if isinstance(config, Mapping):
            config = AutoExportConfig.from_dict(config)
        session = Session(config.export_format)
        exporter = session.exporter()()
        if not isinstance(exporter, HfExporter):
            raise BackendContractError(
                f"The exporter of {session.format!r} is no HfExporter.", backend=session.format
            )
        return exporter
