"""From the caller's inputs to forward kwargs that can be traced: checked, copied, complete."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from polyport import structure
from polyport.errors import ExportError, InputError

STAGE = "capture"

#: Kwargs that ask for a loss.
_LOSS = ("labels", "return_loss", "start_positions", "end_positions", "next_sentence_label")


def check_model(model: Any) -> None:
    """Refuse a model that can't be traced.

    Raises:
        ExportError: Weights on the meta device, or an attention implementation that only exists as a GPU kernel.
    """
    if not isinstance(model, torch.nn.Module):
        raise ExportError(f"A model to export is a torch.nn.Module, not {type(model).__name__}.", stage=STAGE)
    for name, weight in model.named_parameters():
        if weight.device.type == "meta":
            raise ExportError(
                f"The weight {name!r} is on the meta device, so it has no values to export. Load the model onto a "
                "device first (from_pretrained without offloading, or device_map=None).",
                stage=STAGE,
            )
    for module in model.modules():
        chosen = str(getattr(getattr(module, "config", None), "_attn_implementation", None) or "").lower()
        if "flash" in chosen or "flex" in chosen:
            raise ExportError(
                f"{type(module).__name__} uses the attention implementation {chosen!r}, whose kernels can't be exported. "
                'Choose "sdpa" or "eager": model.set_attn_implementation("sdpa").',
                stage=STAGE,
            )


def forward_parameters(model: Any) -> dict[str, inspect.Parameter]:
    """Parameters of the model's forward, by name."""
    return dict(inspect.signature(model.forward).parameters)


def plain_kwargs(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs as a dict of their own: arrays become tensors, tensors and caches are copied, None is left out.

    Raises:
        InputError: Inputs that are no mapping, an unknown or a missing one.
        ExportError: An input that only serves the loss.
    """
    if not isinstance(inputs, Mapping) and not hasattr(inputs, "items"):
        raise InputError(
            f"Inputs are the keyword arguments of the model's forward (a dict or what a tokenizer returns), not "
            f"{type(inputs).__name__}.",
            stage=STAGE,
        )
    given = {name: value for name, value in inputs.items() if value is not None}
    for name in _LOSS:
        if name in given and given[name] is not False:
            raise ExportError(
                f"{name!r} was given, but an export computes the model's outputs, not the loss. Leave it out.",
                stage=STAGE,
            )
    _check_names(model, given)
    return {name: copied(_as_tensor(value)) for name, value in given.items()}


def copied(value: Any) -> Any:
    """The same nested value with tensors and containers of its own."""
    leaves, spec = structure.flatten(value)
    return structure.unflatten(
        [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves], spec
    )


def tensor_leaves(kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors inside the kwargs by dotted name, in the order in which a graph takes them."""
    return {
        name: leaf for name, leaf in structure.flatten_named(dict(kwargs)) if isinstance(leaf, torch.Tensor)
    }


def is_constant(value: Any) -> bool:
    """Whether a kwarg is fixed by the trace: it holds no tensor, and is no cache that will hold some."""
    leaves, spec = structure.flatten(value)
    return not any(isinstance(leaf, torch.Tensor) for leaf in leaves) and (spec.is_leaf() or bool(leaves))


def _as_tensor(value: Any) -> Any:
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        return torch.as_tensor(value)
    return value


def _check_names(model: Any, given: Mapping[str, Any]) -> None:
    parameters = forward_parameters(model)
    extra = next((p for p in parameters.values() if p.kind is p.VAR_KEYWORD), None)
    named = [name for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    known = [*named, *_typed_keywords(model, extra)]
    for name in given:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        # a bare **kwargs passes on to inner models what only they know
        if extra is not None and not near:
            continue
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InputError(
            f"{type(model).__name__} takes no input {name!r}.{hint} It takes: {', '.join(named)}.",
            stage=STAGE,
        )
    for name in named:
        required = parameters[name].default is inspect.Parameter.empty
        if required and name not in given:
            raise InputError(
                f"{type(model).__name__} needs the input {name!r}, which was not given. Given: {', '.join(given)}.",
                stage=STAGE,
            )


def _typed_keywords(model: Any, extra: inspect.Parameter | None) -> Iterator[str]:
    """Keywords that a `**kwargs: Unpack[SomeTypedDict]` lists."""
    if extra is None:
        return
    annotation = extra.annotation
    if isinstance(annotation, str):
        try:
            hints = typing.get_type_hints(inspect.unwrap(type(model).forward), include_extras=True)
        except (NameError, TypeError, AttributeError):
            return
        annotation = hints.get(extra.name)
    for argument in typing.get_args(annotation):
        yield from getattr(argument, "__annotations__", {})
    yield from ("return_dict", "output_attentions", "output_hidden_states", "use_cache")
