"""Inputs that a call may leave out, so that the graph's interface does not depend on the sample's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from polyport.capture.prepare import forward_parameters, tensor_leaves
from polyport.capture.probe import Probe
from polyport.errors import InputError


def complete(model: Any, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Add the attention mask that the model takes and the sample lacks, and find what may be left out of a call.

    An unpadded sample often comes without a mask (`generate` drops one that is all ones); a graph traced from it could
    never run a padded batch.

    Returns:
        The kwargs, and how to fill what a call of the export may leave out: a rule of `ExportMetadata.defaults`, or the
        first word of one whose sizes `sized` adds.
    """
    kwargs, defaults = _with_mask_default(model, dict(kwargs))
    if isinstance(kwargs.get("logits_to_keep"), torch.Tensor):
        defaults["logits_to_keep"] = "arange"
    for types in ("token_type_ids", "mm_token_type_ids"):
        if _types_may_be_left_out(model, kwargs, types):
            defaults[types] = "zeros_like:input_ids"
    return kwargs, defaults


def _types_may_be_left_out(model: Any, kwargs: Mapping[str, Any], name: str) -> bool:
    """Whether the model takes everything for one segment (or for text) when no segments are given."""
    types, ids = kwargs.get(name), kwargs.get("input_ids")
    if not isinstance(types, torch.Tensor) or not isinstance(ids, torch.Tensor) or types.shape != ids.shape:
        return False
    without = {key: value for key, value in kwargs.items() if key != name}
    try:
        left_out = Probe(model, without).base()
    except InputError:
        return False  # the model needs them
    return _same(left_out, Probe(model, {**kwargs, name: torch.zeros_like(types)}).base())


def _with_mask_default(model: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    parameter = forward_parameters(model).get("attention_mask")
    if parameter is None or parameter.default is parameter.empty:
        return kwargs, {}
    ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
    past = past_length(kwargs)
    if mask is None:
        shape = None if past is None else _mask_shape(kwargs, past)
        if shape is None:
            return kwargs, {}
        completed = _with_mask(kwargs, torch.ones(shape, dtype=torch.int64, device=_device(kwargs)))
        if not _is_neutral(model, kwargs, completed):
            return kwargs, {}
        kwargs, mask = completed, completed["attention_mask"]
    if (
        isinstance(ids, torch.Tensor)
        and isinstance(mask, torch.Tensor)
        and mask.shape == ids.shape
        and not past
    ):
        return kwargs, {"attention_mask": "ones_like:input_ids"}
    if past is not None and isinstance(mask, torch.Tensor) and mask.shape == _mask_shape(kwargs, past):
        return kwargs, {"attention_mask": "ones"}
    return kwargs, {}


def sized(
    defaults: Mapping[str, str], kwargs: Mapping[str, Any], axes: Mapping[str, Mapping[int, str]]
) -> dict[str, str]:
    """The defaults with the sizes of what they make, in the names of axes (`ones:batch,past+sequence`)."""

    def sizes(name: str, shape: Sequence[int]) -> str:
        return ",".join(str(axes.get(name, {}).get(dim, size)) for dim, size in enumerate(shape))

    rules = {name: rule for name, rule in defaults.items() if rule not in ("arange", "ones")}
    if (
        "logits_to_keep" in defaults and "logits_to_keep" in axes
    ):  # a fixed number of them is the caller's to choose
        ids = next(key for key in ("input_ids", "inputs_embeds") if key in kwargs)
        rules["logits_to_keep"] = f"arange:{sizes(ids, kwargs[ids].shape).split(',')[1]}"
    if defaults.get("attention_mask") == "ones":
        rules["attention_mask"] = f"ones:{sizes('attention_mask', kwargs['attention_mask'].shape)}"
    for name, leaf in tensor_leaves({"attention_mask": kwargs.get("attention_mask")}).items():
        if (
            "." in name and leaf.dim() == 2
        ):  # masks by kind of layer: where a padding mask is left out, nothing is padded
            rules[name] = f"ones:{sizes(name, leaf.shape)}"
    return rules


def past_length(kwargs: Mapping[str, Any]) -> int | None:
    """Tokens that the cache already holds; None where it doesn't say, as of recurrent layers only."""
    for name in ("cache", "past_key_values", "cache_params"):
        length: Any = getattr(kwargs.get(name), "get_seq_length", None)
        if length is not None:
            try:
                return int(length())
            except ValueError:
                return None
    return None if kwargs.get("state") is not None else 0


def _mask_shape(kwargs: Mapping[str, Any], past: int) -> tuple[int, ...] | None:
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    if isinstance(ids, torch.Tensor) and ids.dim() >= 2:
        return (*ids.shape[:-1], past + ids.shape[-1])
    if isinstance(embeds, torch.Tensor) and embeds.dim() == 3:
        return (embeds.shape[0], past + embeds.shape[1])
    encoded = next(
        (x for n, x in tensor_leaves(kwargs).items() if n.startswith("encoder_outputs") and x.dim() == 3),
        None,
    )
    return tuple(encoded.shape[:2]) if encoded is not None else None


def _with_mask(kwargs: Mapping[str, Any], mask: torch.Tensor) -> dict[str, Any]:
    """The mask behind the ids, where people expect it; the order of kwargs is the order of the graph's inputs."""
    completed: dict[str, Any] = {}
    for name, value in kwargs.items():
        completed[name] = value
        if name in ("input_ids", "inputs_embeds") and "attention_mask" not in completed:
            completed["attention_mask"] = mask
    return completed if "attention_mask" in completed else {**completed, "attention_mask": mask}


def _device(kwargs: Mapping[str, Any]) -> torch.device:
    return next(iter(tensor_leaves(kwargs).values())).device


def _is_neutral(model: Any, without: Mapping[str, Any], completed: Mapping[str, Any]) -> bool:
    """Whether the model reads a mask, and computes with one of ones what it computes without."""
    before = Probe(model, without).base()
    probe = Probe(model, completed)
    try:
        after = probe.run(probe.leaves)
        mask = probe.leaves["attention_mask"].clone()
        mask[..., 0] = 0
        padded = probe.run({**probe.leaves, "attention_mask": mask})
    except Exception:  # noqa: BLE001  a model that fails on a mask is exported without one
        return False
    read = mask.shape[-1] == 1 or any(
        a.is_floating_point() and not torch.equal(a, b) for a, b in zip(after, padded, strict=False)
    )
    return read and _same(before, after)


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and (not a.is_floating_point() or torch.allclose(a, b, rtol=1e-3, atol=1e-4))
        for a, b in zip(one, other, strict=True)
    )
