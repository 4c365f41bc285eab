"""Exporting: the pipeline, and the classes and functions that start it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from polyport import discovery
from polyport.artifact import ExportedModel
from polyport.assembly import Pipeline
from polyport.config import ExportConfig
from polyport.errors import BackendContractError, ConfigError
from polyport.session import Session

if TYPE_CHECKING:
    from transformers import GenerationConfig

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
    return _exported(model, inputs, _jobs(configs, plugins))


def export_for_generation(
    model: Any,
    inputs: Mapping[str, Any],
    configs: Sequence[ExportConfig | Mapping[str, Any]],
    generation_config: GenerationConfig | None = None,
    multi_token_decode: bool = False,
    *,
    plugins: Sequence[Any] = (),
) -> dict[str, ExportedModel]:
    """Export one model for generation to several formats, tracing each component once where their configs allow it.

    Args:
        model: A `PreTrainedModel` that generates. It comes back unchanged, also after an error.
        inputs: Sample kwargs of `generate`; unchanged as well.
        configs: One config (or dict with `export_format`) per format.
        generation_config: See `HfExporter.export_for_generation`.
        multi_token_decode: See `HfExporter.export_for_generation`.
        plugins: More hook implementations for this call.

    Returns:
        Format -> export, in the order of `configs`.

    Raises:
        ExportError: The model or the inputs can't be exported; the message says which component, where and why.
    """
    from polyport.generation.exporting import export_generation

    return export_generation(model, inputs, _jobs(configs, plugins), generation_config, multi_token_decode)


def _jobs(
    configs: Sequence[ExportConfig | Mapping[str, Any]], plugins: Sequence[Any]
) -> list[tuple[Session, ExportConfig]]:
    checked = [
        AutoExportConfig.from_dict(config) if isinstance(config, Mapping) else config for config in configs
    ]
    formats = [config.export_format for config in checked]
    if not formats:
        raise ConfigError("There is nothing to export to: `configs` is empty.")
    if len(set(formats)) != len(formats):
        raise ConfigError(f"A format may be given once, not as in {', '.join(formats)}.")
    return [(Session(config.export_format, plugins), config) for config in checked]


def _exported(
    model: Any, inputs: Mapping[str, Any], jobs: Sequence[tuple[Session, ExportConfig]]
) -> dict[str, ExportedModel]:
    made = Pipeline(model, inputs).run(jobs)
    return {
        session.format: ExportedModel(
            session.format,
            {MODEL: made[session.format][0]},
            config=getattr(model, "config", None),
            generation_config=getattr(model, "generation_config", None),
            sample=made[session.format][1],
            session=session,
        )
        for session, _ in jobs
    }


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
        return _exported(model, inputs, [(session, session.config(config))])[self.export_format]

    def export_for_generation(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        config: ExportConfig | Mapping[str, Any] | None = None,
        generation_config: GenerationConfig | None = None,
        multi_token_decode: bool = False,
        *,
        plugins: Sequence[Any] = (),
    ) -> ExportedModel:
        """Export a model for generation, one component per stage.

        Args:
            model: A `PreTrainedModel` that generates. It comes back unchanged, also after an error.
            inputs: Sample kwargs of `generate`; unchanged as well. The export is not tied to their sizes.
            config: The format's config, a dict of its options, or a dict with a config per component.
            generation_config: For a static cache: `GenerationConfig(cache_implementation="static", max_cache_len=...)`. The
                export generates with it by default; with the model's own when left out.
            multi_token_decode: Have `decode` take any number of tokens, on any cache: one graph then prefills, decodes and
                continues.
            plugins: More hook implementations for this call.

        Returns:
            The export, which has `generate`.

        Raises:
            ExportError: The model or the inputs can't be exported; the message says which component, where and why.
        """
        from polyport.generation.exporting import export_generation

        session = Session(self.export_format, plugins)
        made = export_generation(model, inputs, [(session, config)], generation_config, multi_token_decode)
        return made[self.export_format]


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
