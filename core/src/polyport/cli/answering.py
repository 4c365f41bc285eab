"""One call of `generate`, watched: text as it comes, and how long the tokens took."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from typing import Any, TextIO

import attrs


@attrs.frozen(kw_only=True)
class Answer:
    """What was generated for one prompt.

    Args:
        text: The answer, without special tokens.
        token_ids: Its tokens, up to and with the one that ended it.
        prompt_tokens: Tokens of the prompt that the model read, padding not counted.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int


@attrs.frozen(kw_only=True)
class Timing:
    """How long a call took.

    Args:
        seconds: All of it.
        first: Seconds until the first token; None where there was none.
        rate: Tokens a second after the first, of all rows together; None where there was no second.
    """

    seconds: float
    first: float | None
    rate: float | None


def generate(
    model: Any, tokenizer: Any, inputs: Mapping[str, Any], options: Mapping[str, Any], stream: TextIO | None
) -> tuple[list[Answer], Timing, bool]:
    """Generate, and read what comes out.

    Args:
        model: The export as a model of transformers.
        tokenizer: What its tokens are read with.
        inputs: Kwargs of `generate` that a processor made.
        options: The others.
        stream: Where to write the text as it comes; None to wait for all of it.

    Returns:
        One answer per row, the timing, and whether the text was written to the stream.
    """
    import torch
    from transformers import StoppingCriteriaList

    clock = _Clock()
    options = {**options, "stopping_criteria": StoppingCriteriaList([clock.tick])}
    # classes with a generate of their own may take no streamer
    streams = stream is not None and "streamer" in inspect.signature(model.generate).parameters
    if streams:
        options["streamer"] = _streamer(tokenizer, stream)
    started = time.perf_counter()
    with torch.no_grad():
        made = model.generate(**inputs, **options)
    ended = time.perf_counter()
    sequences = made if isinstance(made, torch.Tensor) else made["sequences"]
    rows = [_answer(model, tokenizer, inputs, sequences, row) for row in range(len(sequences))]
    count = sum(len(row.token_ids) for row in rows) - len(rows)
    first = clock.ticks[0] - started if clock.ticks else None
    rate = count / (ended - clock.ticks[0]) if clock.ticks and count > 0 else None
    return rows, Timing(seconds=ended - started, first=first, rate=rate), streams


class _Clock:
    """A criterion that never stops anything, and keeps the time of the first token."""

    def __init__(self) -> None:
        self.ticks: list[float] = []

    def tick(self, input_ids: Any, scores: Any, **_: Any) -> Any:  # noqa: ARG002 - called with both
        import torch

        if not self.ticks:
            self.ticks.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _streamer(tokenizer: Any, stream: TextIO | None) -> Any:
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        """To the terminal itself: what libraries print is muted meanwhile."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            print(text, end="\n" if stream_end else "", file=stream, flush=True)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _answer(model: Any, tokenizer: Any, inputs: Mapping[str, Any], sequences: Any, row: int) -> Answer:
    """What one row of the result says, without the prompt that most models return with it."""
    from transformers import GenerationMixin

    ids = sequences[row].tolist()
    prompt = inputs.get("input_ids")
    read = 0
    own_way = type(model).generate is not GenerationMixin.generate
    if prompt is not None:
        mask = inputs.get("attention_mask")
        read = int(prompt.shape[1] if mask is None or mask.shape != prompt.shape else mask[row].sum())
        given = prompt[row].tolist()
        if not model.config.is_encoder_decoder and ids[: len(given)] == given:
            ids = ids[len(given) :]
    if model.config.is_encoder_decoder and not own_way and ids[:1] == [_start(model)]:
        ids = ids[1:]
    ids = _ended(ids, model.generation_config)
    return Answer(
        text=tokenizer.decode(ids, skip_special_tokens=True).strip(), token_ids=ids, prompt_tokens=read
    )


def _start(model: Any) -> int | None:
    from polyport.samples import decoder_start

    return decoder_start(model.config, model.generation_config)


def _ended(ids: list[int], generation_config: Any) -> list[int]:
    """The tokens without the padding behind an answer that ended before others."""
    ends = getattr(generation_config, "eos_token_id", None)
    stops = set(ends if isinstance(ends, (list, tuple)) else () if ends is None else (ends,))
    for index, token in enumerate(ids):
        if token in stops:
            return ids[: index + 1]
    return ids
