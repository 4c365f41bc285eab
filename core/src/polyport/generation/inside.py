"""State that a model keeps inside of its modules between calls, where no component can take or return it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from polyport import structure
from polyport.capture import untouched
from polyport.capture.prepare import copied
from polyport.errors import ExportError
from polyport.generation.stages import STAGE

#: How many of the places are named.
_NAMED = 3


def refuse_state_inside(
    model: torch.nn.Module, host: torch.nn.Module, prompt: Mapping[str, Any], step: Mapping[str, Any]
) -> None:
    """Refuse a model whose decode step depends on more than what it is called with.

    The step is run where `generate` runs it, after the prompt; once more, after itself; and on its own, as it is traced.

    Args:
        model: The model, in the state in which it is traced.
        host: The module of the two calls.
        prompt: Kwargs of the call before the step.
        step: Kwargs of the step.

    Raises:
        ExportError: The results differ.
    """
    with untouched(model):
        try:
            _first_tensor(host, prompt)
            before = _held(model)
            wanted = _first_tensor(host, step)
        except Exception:  # noqa: BLE001  a call that can't be repeated tells nothing; tracing will say what is wrong
            return
        changed = [name for name, mark in _held(model).items() if before.get(name) != mark]
        same = _agrees(host, step, wanted)
    if same:
        with untouched(model):
            same = _agrees(host, step, wanted)
    if not same:
        named = ", ".join(changed[:_NAMED]) + (
            f" and {len(changed) - _NAMED} more" if changed[_NAMED:] else ""
        )
        raise ExportError(
            f"{type(host).__name__} keeps state inside of its modules between calls{f' ({named})' if named else ''}: the "
            "same decode step gives another result after another call. So it can't be exported for generation; export() "
            "exports its forward.",
            stage=STAGE,
        )


def _agrees(host: torch.nn.Module, step: Mapping[str, Any], wanted: torch.Tensor) -> bool:
    try:
        found = _first_tensor(host, step)
    except Exception:  # noqa: BLE001  it ran before
        return False
    scale = float(wanted.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return found.shape == wanted.shape and torch.allclose(
        found, wanted, rtol=1e-3, atol=1e-3 * scale, equal_nan=True
    )


def _first_tensor(host: torch.nn.Module, kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The logits of a call, or what else it returns first; the arguments stay as they are."""
    outputs = host(**copied(dict(kwargs)))
    logits = getattr(outputs, "logits", None)
    leaves = [logits] if logits is not None else structure.flatten(outputs)[0]
    return next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)).float()


def _held(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """The tensors that modules hold beside their weights, by path, each with what changes when it does."""
    return {
        f"{path}.{name}".lstrip("."): (id(value), value._version)
        for path, module in model.named_modules()
        for name, value in (*module._buffers.items(), *vars(module).items())
        if isinstance(value, torch.Tensor)
    }
