"""Sample inputs for a model: through its own tokenizer or processor where there is one, else from its config."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyport.errors import ExportError, InputError
from polyport.samples import media
from polyport.samples.from_config import inputs_from_config, token_ids
from polyport.samples.processors import Processors, load_processors

#: Forward kwargs that pictures and sound end up in. Text always ends up in `input_ids`.
_IMAGE_INPUTS = ("pixel_values", "flattened_patches", "pixel_values_images")
_AUDIO_INPUTS = ("input_features", "input_values", "audio_values", "input_audio_embeds")


def sample_inputs(
    model: Any,
    path_or_id: str | Path,
    task: str | None = None,
    *,
    text: Sequence[str] = (),
    images: Sequence[Any] = (),
    audio: Sequence[Any] = (),
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
) -> tuple[dict[str, Any], Any]:
    """Make inputs to try a model with.

    Args:
        model: A `PreTrainedModel`.
        path_or_id: Where it came from, and its tokenizer or processor lies.
        task: Name of its task, where known.
        text: Sentences to use in place of the built-in one.
        images: Pictures to use in place of the built-in one (`PIL.Image` or uint8 [height, width, 3]).
        audio: Sounds to use in place of the built-in one (float [samples], at the model's sampling rate).
        revision: Branch, tag or commit on the Hub.
        token: Access token for the Hub.
        trust_remote_code: Let code from the repository run.
        gguf_file: Name of the GGUF file in it that holds the tokenizer.

    Returns:
        The forward kwargs (only such as the model's forward takes, in its dtype and on its device), and what to save
        beside an export: the tokenizer, processor or `Processors` with `save_pretrained`, None where there is none.

    Raises:
        ExportError: Neither the processor nor the config tells what the model needs; give inputs by hand.
        InputError: The processor can't take the text, pictures or sounds that were given.
    """
    given = bool(text or images or audio)
    try:
        processors = load_processors(
            path_or_id,
            revision=revision,
            token=token,
            trust_remote_code=trust_remote_code,
            gguf_file=gguf_file,
        )
    except ExportError as error:
        if given:
            raise
        warnings.warn(
            f"{error} Sample inputs are made from the config, and no such files are saved.", stacklevel=2
        )
        processors = Processors()
    inputs = None
    if processors.parts:
        try:
            inputs = _from_processors(model, processors, text, images, audio)
        except InputError as error:
            if given:
                raise
            warnings.warn(f"{error} Sample inputs are made from the config.", stacklevel=2)
    elif given:
        processors(text=text, images=images, audio=audio)  # raises: nothing here takes them
    if inputs is None:
        inputs = inputs_from_config(model, task)
    elif task == "multiple-choice" and inputs["input_ids"].ndim == 2:
        inputs = {name: value[:, None].repeat(1, 2, 1) for name, value in inputs.items()}
    return fit_inputs(model, add_decoder_inputs(model, inputs)), processors.single()


def fit_inputs(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs that the model's forward takes, floats in its dtype, everything on its device.

    Args:
        model: A `PreTrainedModel`.
        inputs: Forward kwargs.

    Returns:
        The fitting ones, as a new dict.
    """
    import torch

    takes = inspect.signature(model.forward).parameters
    fitted: dict[str, Any] = {}
    for name, value in inputs.items():
        if name not in takes:
            continue
        is_tensor = isinstance(value, torch.Tensor)
        dtype = model.dtype if is_tensor and value.is_floating_point() else None
        fitted[name] = value.to(model.device, dtype) if is_tensor else value
    return fitted


def add_decoder_inputs(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with `decoder_input_ids`, where the model is an encoder-decoder that takes them and they are missing.

    Args:
        model: A `PreTrainedModel`.
        inputs: Forward kwargs.

    Returns:
        A new dict. Its `decoder_input_ids` begin with the token that the model's own generation begins with, and have
        as many rows as the other inputs.
    """
    added = dict(inputs)
    takes = inspect.signature(model.forward).parameters
    has_ids = "decoder_input_ids" in takes and getattr(model.config, "is_encoder_decoder", False)
    # heads that read one position of the decoder make its ids from `input_ids`, and fail on others
    reads_input = type(model).__name__.endswith(("Classification", "QuestionAnswering"))
    if (
        not has_ids
        or reads_input
        or not added
        or {"decoder_input_ids", "decoder_inputs_embeds"} & added.keys()
    ):
        return added
    ids = token_ids(model.config, 5)[:, :-1]  # without the end token
    start = decoder_start(model.config, getattr(model, "generation_config", None))
    if start is not None:
        ids[:, 0] = start
    added["decoder_input_ids"] = ids.repeat(len(next(iter(added.values()))), 1)
    return added


def _from_processors(
    model: Any, processors: Processors, text: Sequence[str], images: Sequence[Any], audio: Sequence[Any]
) -> dict[str, Any] | None:
    """Inputs through the model's own processors; None where they don't cover what the model takes."""
    takes = inspect.signature(model.forward).parameters
    wants_text = "input_ids" in takes and processors.tokenizer is not None
    wants_image = processors.image_processor is not None and any(name in takes for name in _IMAGE_INPUTS)
    wants_audio = processors.feature_extractor is not None and any(name in takes for name in _AUDIO_INPUTS)
    if wants_text and not text:
        text = (media.TEXT,) * max(1, len(images), len(audio))
    rows = max(1, len(text))
    if wants_image and not images:
        images = (media.as_image(media.picture()),) * rows
    if wants_audio and not audio:
        audio = (media.chirp(processors.sampling_rate),) * rows
    if not (text or images or audio):
        return None
    inputs = {
        name: value
        for name, value in processors(text=text, images=images, audio=audio).items()
        if name in takes
    }
    main = model.main_input_name
    covered = all(name in inputs for name in ([main] if isinstance(main, str) else main))
    return inputs if covered else None


def decoder_start(config: Any, generation_config: Any = None) -> int | None:
    """The token that the generation of an encoder-decoder model begins with.

    Args:
        config: The model's config.
        generation_config: Its generation config, which is asked first.

    Returns:
        A token id; None where neither names one.
    """
    decoder = getattr(config, "decoder", None)
    for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        for place in (generation_config, config, decoder, config.get_text_config(decoder=True)):
            value = getattr(place, name, None)
            value = value[0] if isinstance(value, (list, tuple)) and value else value
            if isinstance(value, int):
                return value
    return None
