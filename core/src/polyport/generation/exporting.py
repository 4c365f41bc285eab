"""Exporting a model for generation: one component per stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from transformers import GenerationConfig

from polyport.artifact import ExportedModel
from polyport.assembly import Pipeline, check
from polyport.capture.prepare import copied
from polyport.config import ExportConfig
from polyport.errors import ConfigError, ExportError, PolyportError
from polyport.generation.decompose import decompose, whole_config
from polyport.generation.parts import Decomposition, Part
from polyport.generation.record import GenerationRecord, attention_of, uncovered_tensors
from polyport.generation.stages import DECODE
from polyport.pipeline import ExportedComponent
from polyport.session import Session

#: What is used where no config is given: sizes grow with every token.
_OPEN = {"dynamic": True}

#: One config for all components, or component -> config.
Configs = ExportConfig | Mapping[str, Any] | None


def export_generation(
    model: Any,
    inputs: Mapping[str, Any],
    jobs: Sequence[tuple[Session, Configs]],
    generation_config: GenerationConfig | None,
    multi_token_decode: bool,
) -> dict[str, ExportedModel]:
    """Export a model's generation to several formats, tracing each component once where their configs allow it.

    Args:
        model: A `PreTrainedModel` that generates.
        inputs: Sample kwargs of `generate`.
        jobs: Session and config, or configs by component, per format.
        generation_config: See `decompose_for_generation`.
        multi_token_decode: See `decompose_for_generation`.

    Returns:
        Format -> export.
    """
    for session, config in jobs:
        check(model, session, session.config(_any_config(session, config)))
    found = decompose(model, inputs, generation_config, multi_token_decode)
    configs = {session.format: _by_component(session, config, found) for session, config in jobs}
    components: dict[str, dict[str, ExportedComponent]] = {session.format: {} for session, _ in jobs}
    for name, part in found.parts.items():
        try:
            made = Pipeline(part.module, part.kwargs, part.pinned).run(
                [(session, configs[session.format][name]) for session, _ in jobs]
            )
        except PolyportError as error:
            error.add_note(f"while exporting the component {name!r} ({part.path or type(model).__name__})")
            if isinstance(error, ExportError):
                raise type(error)(
                    f"Component {name!r}: {error}", stage=error.stage, backend=error.backend
                ) from error
            raise
        for session, _ in jobs:
            component = made[session.format][0]
            _check_single_tokens(name, part, component)
            components[session.format][name] = component
    return {
        session.format: _exported(
            model, inputs, found, components[session.format], session, generation_config
        )
        for session, _ in jobs
    }


def _exported(
    model: Any,
    inputs: Mapping[str, Any],
    found: Decomposition,
    components: Mapping[str, ExportedComponent],
    session: Session,
    generation_config: GenerationConfig | None,
) -> ExportedModel:
    host = found.parts[DECODE].module
    return ExportedModel(
        session.format,
        components,
        config=model.config,
        sample=copied(dict(inputs)),
        generation_config=whole_config(host, generation_config),
        session=session,
        generation=GenerationRecord(
            architecture=type(model).__name__,
            host=found.plan.host,
            steps=[name for name in found.parts if name not in found.plan.modules],
            modules=dict(found.plan.modules),
            split=found.plan.split,
            multi_token_decode=found.multi_token_decode,
            static=found.static,
            attn_implementation=attention_of(model.config),
        ),
        leftovers=uncovered_tensors(model, found.plan),
    )


def _check_single_tokens(name: str, part: Part, component: ExportedComponent) -> None:
    """Refuse a decode step for several tokens that can't take one: then nothing can be generated with it.

    Raises:
        ExportError: It can't.
    """
    for axis in ("sequence", "decoder_sequence"):
        span = component.metadata.axes.get(axis)
        if name == DECODE and not part.pinned and span is not None and span.min > 1:
            raise ExportError(
                f"Component {name!r}: {type(part.module).__name__} computes differently from {span.min} tokens on, so a graph "
                "for several tokens can't take one. Export with multi_token_decode=False.",
                stage="trace",
            )


def _any_config(session: Session, config: Configs) -> ExportConfig | Mapping[str, Any] | None:
    """A config to check the model with, before its components are known."""
    if _names_components(session, config):
        return next(iter(config.values()), None)  # type: ignore[union-attr]
    return config


def _names_components(session: Session, config: Configs) -> bool:
    options = {field.name for field in attrs.fields(session.backend.config_class)} | {"export_format"}
    return isinstance(config, Mapping) and bool(config) and not options.intersection(config)


def _by_component(session: Session, config: Configs, found: Decomposition) -> dict[str, ExportConfig]:
    """The config of each component.

    Raises:
        ConfigError: The configs by component lack some, or name one that there isn't; or a step on a cache that grows shall
            keep its sizes.
    """
    names = list(found.parts)
    if _names_components(session, config):
        configs = _chosen(session, config, names)
    else:
        configs = dict.fromkeys(names, session.config(_OPEN if config is None else config))
    if found.growing and not configs[DECODE].dynamic and configs[DECODE].dynamic_shapes is None:
        raise ConfigError(
            "With dynamic=False, a decode step only takes a cache of the sample's length, which grows with every token. "
            'Export with dynamic=True, or with a static cache: GenerationConfig(cache_implementation="static", '
            "max_cache_len=...)."
        )
    return configs


def _chosen(session: Session, config: Any, names: list[str]) -> dict[str, ExportConfig]:
    missing, unknown = [n for n in names if n not in config], [n for n in config if n not in names]
    if missing or unknown:
        problems = [f"lacks {', '.join(missing)}"] * bool(missing) + [
            f"names {', '.join(unknown)}, which there isn't"
        ] * bool(unknown)
        raise ConfigError(
            f"The config by component {' and '.join(problems)}. The components are {', '.join(names)}."
        )
    return {name: session.config(_OPEN if config[name] is None else config[name]) for name in names}
