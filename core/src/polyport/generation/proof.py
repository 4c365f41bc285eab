"""Whether an export answers as its model does: the logits of every token of a short answer, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from polyport.caches import find_dtype
from polyport.errors import InputError, PolyportError
from polyport.verify import TOLERANCES, CaseReport, OutputReport, VerificationReport

#: Tokens of the answer.
_TOKENS = 8


def compare_answers(
    model: Any,
    exported: Any,
    inputs: Mapping[str, Any],
    *,
    atol: float | None = None,
    rtol: float | None = None,
) -> VerificationReport:
    """Let both answer the sample, and compare.

    Only steps with the same tokens before them are compared: where two tokens are as likely, either may be taken, and
    what follows is another answer.

    Args:
        model: The model.
        exported: The export of it, with `generate`.
        inputs: Sample kwargs of `generate`.
        atol: Absolute tolerance; by default that of the model's dtype (`TOLERANCES`).
        rtol: Relative tolerance, likewise.

    Returns:
        The report.

    Raises:
        InputError: The model itself fails on the sample.
    """
    limits = TOLERANCES.get(find_dtype(str(model.dtype).removeprefix("torch.")), (0.0, 0.0))
    limits = (limits[0] if atol is None else atol, limits[1] if rtol is None else rtol)
    cases = []
    for name, kwargs in _cases(model, exported, inputs):
        with torch.no_grad():
            try:
                expected = _answer(model, kwargs)
            except Exception as error:
                raise InputError(
                    f"{type(model).__name__} itself fails to generate from the sample: {error}",
                    stage="verify",
                ) from error
            try:
                got = _answer(exported, kwargs)
            except PolyportError as error:
                cases.append(CaseReport(name, {}, (), str(error)))
                continue
            except Exception as error:  # noqa: BLE001 - whatever a runtime raises is a finding
                cases.append(CaseReport(name, {}, (), f"{type(error).__name__}: {error}"))
                continue
        report = _compared(expected, got, *limits)
        cases.append(CaseReport(name, {"batch": len(_sequences(expected))}, (report,)))
    return VerificationReport(tuple(cases))


def _cases(model: Any, exported: Any, inputs: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The sample, and, where it is nothing but text, a batch of it whose second row begins with padding."""
    yield "answer", dict(inputs)
    if set(inputs) != {"input_ids", "attention_mask"} or model.config.is_encoder_decoder:
        return
    spans = [one.metadata.axes.get("batch") for one in getattr(exported, "components", {}).values()]
    if any(span is not None and span.max is not None and span.max < 2 for span in spans):
        return
    ids = inputs["input_ids"]
    mask = torch.as_tensor(inputs["attention_mask"])[:1].repeat(2, 1)
    mask[1, : ids.shape[1] // 3] = 0
    yield "left padding", {"input_ids": ids[:1].repeat(2, 1), "attention_mask": mask}


def _answer(generating: Any, inputs: Mapping[str, Any]) -> Any:
    return generating.generate(
        **inputs,
        max_new_tokens=_TOKENS,
        min_new_tokens=_TOKENS,
        do_sample=False,
        num_beams=1,
        return_dict_in_generate=True,
        output_logits=True,
    )


def _sequences(made: Any) -> Any:
    return made["sequences"] if isinstance(made, Mapping) else made


def _compared(expected: Any, got: Any, atol: float, rtol: float) -> OutputReport:
    """The report of one answer: its logits where the model gives them out, else its tokens."""
    wanted, found = _sequences(expected).cpu(), _sequences(got).cpu()
    pairs = list(zip(_logits(expected), _logits(got), strict=False))
    if not pairs:
        same = wanted.shape == found.shape and bool((wanted == found).all())
        return OutputReport("tokens", None, None, 0.0, 0.0, same, "" if same else "other tokens")
    start = wanted.shape[1] - len(pairs)
    worst, scale, wrong, count = 0.0, 0.0, 0, 0
    alike = torch.ones(len(wanted), dtype=torch.bool)
    for step, (model_step, own_step) in enumerate(pairs):
        a, b = model_step.cpu().double()[alike], own_step.cpu().double()[alike]
        difference = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=math.inf)
        size = torch.where(a.isfinite(), a.abs(), 0.0)
        worst, scale = max(worst, float(difference.max())), max(scale, float(size.max()))
        wrong += int((difference > atol + rtol * size).sum())
        count += difference.numel()
        if start + step < min(wanted.shape[1], found.shape[1]):
            alike &= wanted[:, start + step] == found[:, start + step]
        if not bool(alike.any()):
            break
    reason = f"{wrong} of {count} values differ" if wrong else ""
    return OutputReport("logits", worst, worst / scale if scale else worst, atol, rtol, not wrong, reason)


def _logits(made: Any) -> Any:
    """The raw logits of each step, each [rows, vocabulary]; empty for classes whose own `generate` keeps them back."""
    found = made.get("logits") if isinstance(made, Mapping) else None
    return found if isinstance(found, tuple) and all(getattr(one, "ndim", 0) == 2 for one in found) else ()
