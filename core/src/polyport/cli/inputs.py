"""From the options about inputs to forward kwargs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from polyport.errors import InputError


@attrs.frozen(kw_only=True)
class GivenInputs:
    """What was given on the command line to make inputs of.

    Args:
        text: `--text`.
        image: `--image`.
        audio: `--audio`.
        specs: `--input`.
        file: `--inputs`.
    """

    text: Sequence[str] = ()
    image: Sequence[Path] = ()
    audio: Sequence[Path] = ()
    specs: Sequence[str] = ()
    file: Path | None = None

    @property
    def by_hand(self) -> bool:
        """Whether tensors themselves were given."""
        return bool(self.specs) or self.file is not None

    @property
    def raw(self) -> bool:
        """Whether something for the processor was given."""
        return bool(self.text or self.image or self.audio)

    def read(self) -> dict[str, Any]:
        """The tensors and values that were given by hand."""
        from polyport.samples import read_inputs

        return read_inputs(self.specs, self.file)

    def media(self, sampling_rate: int) -> dict[str, Any]:
        """Text, pictures and sounds, read from their files, as `Processors` and `sample_inputs` take them."""
        from polyport.samples.media import read_audio, read_image

        return {
            "text": list(self.text),
            "images": [read_image(path) for path in self.image],
            "audio": [read_audio(path, sampling_rate) for path in self.audio],
        }

    def for_model(self, model: Any, name: str, task: str | None, **source: Any) -> tuple[dict[str, Any], Any]:
        """Inputs to export or verify a model with: what was given by hand, else samples.

        Args:
            model: The model.
            name: Its folder or id.
            task: Its task, where known.
            source: `revision`, `trust_remote_code`.

        Returns:
            Forward kwargs, and the processor to save beside the export (None where there is none).

        Raises:
            InputError, ExportError: They can't be read or made.
        """
        from polyport.errors import ExportError
        from polyport.samples import add_decoder_inputs, fit_inputs, load_processors, sample_inputs

        if not self.by_hand:
            rate = load_processors(name, **source).sampling_rate if self.audio else 0
            return sample_inputs(model, name, task, **self.media(rate), **source)
        try:
            processors = load_processors(name, **source)
        except ExportError:
            if self.raw:
                raise
            processors = None  # the inputs don't need it, and saving it is a courtesy
        inputs: dict[str, Any] = {}
        if self.raw and processors is not None:
            inputs |= processors(**self.media(processors.sampling_rate))
        by_hand = self.read()
        fitted = fit_inputs(model, add_decoder_inputs(model, inputs | by_hand))
        unknown = [key for key in by_hand if key not in fitted]
        if unknown:
            raise InputError(
                f"{type(model).__name__} takes no input {', '.join(map(repr, unknown))}. It takes: "
                f"{', '.join(_parameters(model))}.",
                stage="inputs",
            )
        return fitted, None if processors is None else processors.single()

    def for_generation(
        self, model: Any, name: str, task: str | None, **source: Any
    ) -> tuple[dict[str, Any], Any]:
        """Like `for_model`, as kwargs of `generate`: the beginning of an answer is its own to make."""
        inputs, processor = self.for_model(model, name, task, **source)
        by_hand = self.read() if self.by_hand else {}
        return {
            key: value for key, value in inputs.items() if not key.startswith("decoder_") or key in by_hand
        }, processor

    def for_export(self, exported: Any, location: str) -> dict[str, Any]:
        """Inputs to run an export with.

        Args:
            exported: The export.
            location: Its folder, where its processor lies.

        Returns:
            Kwargs of the call: only such as the export takes, except that what was given by hand stays, so that the
            call itself refuses what it can't take.

        Raises:
            InputError: Nothing was given, or it can't be read.
        """
        from polyport.samples import load_processors

        accepts = {
            info.name.partition(".")[0]
            for component in exported.components.values()
            for info in component.metadata.inputs
        }
        if not self.by_hand and not self.raw:
            raise InputError(
                "There is nothing to run the export on. Give --text, --image, --audio, --input or --inputs; it takes: "
                f"{', '.join(sorted(accepts))}.",
                stage="inputs",
            )
        inputs: dict[str, Any] = {}
        if self.raw:
            processors = load_processors(location)
            made = processors(**self.media(processors.sampling_rate))
            inputs |= {name: value for name, value in made.items() if name in accepts}
        inputs |= self.read()
        return _with_decoder_start(exported, inputs, accepts)


def _with_decoder_start(exported: Any, inputs: dict[str, Any], accepts: set[str]) -> dict[str, Any]:
    """The inputs with the first token of an answer, for encoder-decoder exports that were given none."""
    import torch

    from polyport.samples import decoder_start

    if (
        "decoder_input_ids" not in accepts
        or "decoder_input_ids" in inputs
        or not inputs
        or exported.config is None
    ):
        return inputs
    start = decoder_start(exported.config, exported.generation_config)
    if start is None:
        return inputs
    rows = next(
        (len(value) for value in inputs.values() if isinstance(value, torch.Tensor) and value.ndim), 1
    )
    return {**inputs, "decoder_input_ids": torch.full((rows, 1), start)}


def _parameters(model: Any) -> list[str]:
    import inspect

    return [
        name for name, p in inspect.signature(model.forward).parameters.items() if p.kind is not p.VAR_KEYWORD
    ]
