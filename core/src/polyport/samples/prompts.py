"""From prompts as people write them to the kwargs of `generate`: chat templates, placeholders, and padding."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from polyport.errors import InputError
from polyport.samples.processors import Processors, as_tensors
from polyport.samples.sampling import fit_inputs


def prompt_inputs(
    processors: Processors,
    prompts: Sequence[str],
    *,
    images: Sequence[Any] = (),
    audio: Sequence[Any] = (),
    system: str | None = None,
    raw: bool = False,
    padding_side: str = "left",
) -> dict[str, Any]:
    """Make kwargs of `generate` from prompts.

    Args:
        processors: The model's tokenizer or processor.
        prompts: One text per row; none for models that only look or listen.
        images: Pictures, the same number for every prompt, in order.
        audio: Sounds, likewise.
        system: What the model is told before each prompt.
        raw: Give the prompts as they are, without the model's chat template.
        padding_side: Where shorter prompts are filled up: generation goes on at the right end.

    Returns:
        The kwargs, as torch tensors.

    Raises:
        InputError: A tokenizer or processor is missing, or can't take this.
    """
    if not prompts:
        if any(len(sound) > _window(processors) for sound in audio):
            return _long_sound(processors, audio)
        return processors(images=images, audio=audio)
    if processors.tokenizer is None:
        raise InputError(
            "There is no tokenizer beside the export, so a prompt can't be read. Save the model's there: "
            "tokenizer.save_pretrained(folder).",
            stage="inputs",
        )
    media = {kind: list(given) for kind, given in (("image", images), ("audio", audio)) if given}
    for kind, given in media.items():
        if len(given) % len(prompts):
            raise InputError(
                f"Give every prompt the same number of {kind} files: {len(given)} can't be shared out among {len(prompts)}.",
                stage="inputs",
            )
    counts = {kind: len(given) // len(prompts) for kind, given in media.items()}
    _check_takes(processors, media)
    template = None if raw else _template(processors)
    if template is None and system is not None:
        raise InputError(
            "A system message needs the model's chat template"
            + (
                ", which --raw leaves out." if raw else ", and this model has none: write it into the prompt."
            ),
            stage="inputs",
        )
    texts = [_text(processors, template, prompt, counts, system) for prompt in prompts]
    return _called(processors, texts, media, template is not None, padding_side)


def fit_prompt(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What the model's `generate` takes of its processor's inputs, in the model's dtype and on its device."""
    fitted = fit_inputs(model, inputs)
    takes = inspect.signature(model.generate).parameters
    return fitted | {name: value for name, value in inputs.items() if name not in fitted and name in takes}


def _check_takes(processors: Processors, media: Mapping[str, Any]) -> None:
    parts = {"image": processors.image_processor, "audio": processors.feature_extractor}
    for kind in media:
        if processors.whole is None or parts[kind] is None:
            raise InputError(
                f"This model takes no {kind} with a prompt: there is no processor for both beside the export.",
                stage="inputs",
            )


def _template(processors: Processors) -> Any:
    """The tokenizer or processor that has a chat template; None where neither does."""
    for holder in (processors.whole, processors.tokenizer):
        if getattr(holder, "chat_template", None):
            return holder
    return None


def _text(
    processors: Processors, template: Any, prompt: str, counts: Mapping[str, int], system: str | None
) -> str:
    """One prompt as the model reads it."""
    whole = template is not None and template is processors.whole
    if not whole:
        prompt = _placeholders(processors, prompt, counts) + prompt
    if template is None:
        return prompt

    def content(text: str, *parts: str) -> Any:
        # templates of tokenizers read text, those of processors lists of parts
        return [*({"type": kind} for kind in parts), {"type": "text", "text": text}] if whole else text

    shown = [kind for kind, count in counts.items() for _ in range(count)]
    chat = [{"role": "system", "content": content(system)}] if system is not None else []
    chat.append({"role": "user", "content": content(prompt, *shown)})
    try:
        text: str = template.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    except Exception as error:
        raise InputError(
            f"The model's chat template can't take this ({error}). Leave it out with --raw.", stage="inputs"
        ) from error
    return text


def _placeholders(processors: Processors, prompt: str, counts: Mapping[str, int]) -> str:
    """What stands in the text for the pictures and sounds, where the prompt doesn't say so itself."""
    tokens = {kind: getattr(processors.whole, f"{kind}_token", None) for kind in counts}
    return "".join(
        str(token) * counts[kind] for kind, token in tokens.items() if token and str(token) not in prompt
    )


def _called(
    processors: Processors, texts: list[str], media: Mapping[str, list[Any]], chat: bool, padding_side: str
) -> dict[str, Any]:
    tokenizer, rows = processors.tokenizer, len(texts)
    if rows > 1 and tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise InputError(
                "This tokenizer has no token to fill shorter prompts up with: give one prompt at a time.",
                stage="inputs",
            )
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = padding_side
    options: dict[str, Any] = {"return_tensors": "pt", "padding": rows > 1}
    start = tokenizer.bos_token
    if chat and (not media or (start and texts[0].startswith(start))):
        options["add_special_tokens"] = False  # the template has written them
    for kind, given in media.items():
        each = len(given) // rows
        nested = [given[i * each : (i + 1) * each] for i in range(rows)]
        options["images" if kind == "image" else kind] = (
            nested if kind == "image" and rows > 1 else given
        )  # pictures go to rows by nesting, sounds by order
    if "audio" in media:
        options["sampling_rate"] = processors.sampling_rate
    reader = processors.whole if media else tokenizer
    try:
        return as_tensors(reader(text=texts, **options))
    except Exception as error:
        raise InputError(
            f"The model's {type(reader).__name__} can't make inputs of this: {error}", stage="inputs"
        ) from error


def _window(processors: Processors) -> float:
    """Samples of sound that the model hears at once, where it has such a window."""
    return getattr(processors.feature_extractor, "n_samples", None) or float("inf")


def _long_sound(processors: Processors, audio: Sequence[Any]) -> dict[str, Any]:
    """Sound that is longer than the model's window: `generate` goes through it piece by piece, told by timestamps."""
    try:
        made = processors.feature_extractor(
            list(audio),
            sampling_rate=processors.sampling_rate,
            return_tensors="pt",
            truncation=False,
            padding="longest",
            return_attention_mask=True,
        )
    except Exception as error:
        raise InputError(f"The sound can't be read by the model: {error}", stage="inputs") from error
    return {**as_tensors(made), "return_timestamps": True}
