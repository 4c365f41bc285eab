"""What `polyport export --generate` does in place of exporting one graph."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import attrs

from polyport.cli.progress import Stages
from polyport.config import ExportConfig
from polyport.errors import ConfigError
from polyport.markers import hookimpl
from polyport.progress import Progress, Watch


@attrs.frozen
class Generation:
    """How to export for generation, as given on the command line.

    Args:
        multi_token: `--multi-token-decode`.
        static: `--static-cache`.
    """

    multi_token: bool = False
    static: int | None = None

    @classmethod
    def from_options(
        cls, generate: bool, multi_token: bool, static: int | None, dynamic: bool
    ) -> Generation | None:
        """None where `--generate` wasn't given.

        Raises:
            ConfigError: It wasn't, and one of the others was; or `--static` was, too.
        """
        if generate and not dynamic:
            raise ConfigError(
                "With --static, the sample's prompt would be the only one that fits. Leave it out, and give "
                "--static-cache N for a cache of a fixed size."
            )
        if generate:
            return cls(multi_token, static)
        given = ["--multi-token-decode"] * multi_token + ["--static-cache"] * (static is not None)
        if given:
            raise ConfigError(
                f"Add --generate: without it, nothing generates, and there is no use for {' and '.join(given)}."
            )
        return None

    def export(
        self, stages: Stages, model: Any, inputs: Mapping[str, Any], configs: Sequence[ExportConfig]
    ) -> dict[str, Any]:
        """Export a model's components to every format.

        Args:
            stages: Where to say what is being done.
            model: The model.
            inputs: Sample kwargs of its `generate`.
            configs: One per format.

        Returns:
            Format -> export.

        Raises:
            ExportError, InputError: See `polyport.export_for_generation`.
        """
        import polyport

        with contextlib.ExitStack() as watching:
            watching.enter_context(stages.stage("Watching the model generate"))
            part = _Part(watching)
            # the last plugin is asked first: the part has its name when its stages are announced
            plugins = [Progress(part.announced(stages)), part]
            return polyport.export_for_generation(
                model, inputs, configs, self._config(model), self.multi_token, plugins=plugins
            )

    def _config(self, model: Any) -> Any:
        """The model's own generation config with a static cache; None where it has to grow."""
        if self.static is None:
            return None
        from transformers import GenerationConfig

        config = copy.deepcopy(getattr(model, "generation_config", None)) or GenerationConfig()  # type: ignore[no-untyped-call]
        config.cache_implementation, config.max_cache_len = "static", self.static
        return config


#: Stage of an export -> what to say of it, for one component.
_DOING = {
    "capture": "Axes of {part}",
    "trace": "Tracing {part}",
    "lower": "Lowering {part} to {format}",
    "quantize graph": "Quantizing the graph of {part} for {format}",
    "quantize program": "Quantizing {part} for {format}",
}


class _Part:
    """Knows which component is being exported, from what is captured.

    Args:
        watching: What is left when the first component is known.
    """

    def __init__(self, watching: contextlib.ExitStack) -> None:
        self._name = ""
        self._watching = watching

    @hookimpl(wrapper=True)
    def polyport_capture(self, model: Any, inputs: Mapping[str, Any]) -> Generator[None, Any, Any]:
        self._watching.close()
        self._name = _named(model, inputs)
        return (yield)

    def announced(self, stages: Stages) -> Watch:
        """What announces each stage with the component's name."""
        return lambda stage, name: stages.stage(_DOING[stage].format(part=self._name, format=name))


def _named(module: Any, kwargs: Mapping[str, Any]) -> str:
    """A component in words: the class of its module, and whether it is the step that goes on from a filled cache."""
    from transformers.cache_utils import Cache

    from polyport.generation.states import tokens_in

    goes_on = any(isinstance(value, Cache) and tokens_in(value) for value in kwargs.values())
    return f"{type(module).__name__}'s decode" if goes_on else type(module).__name__
