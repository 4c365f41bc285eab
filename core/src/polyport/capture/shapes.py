"""The user's own `dynamic_shapes`."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from polyport import structure
from polyport.capture.layout import propose
from polyport.capture.prepare import STAGE, is_constant, tensor_leaves
from polyport.capture.probe import Probe, rebuilt
from polyport.capture.resize import resized
from polyport.errors import ExportError


def checked_shapes(shapes: Any, kwargs: Mapping[str, Any], supplied: Collection[str]) -> dict[str, Any]:
    """The user's shapes with an entry for every input; what they don't name stays static.

    Args:
        shapes: As `torch.export.export` takes it, per forward kwarg.
        kwargs: The prepared kwargs.
        supplied: Names of the inputs that the caller gave.

    Raises:
        ExportError: Shapes that are no mapping, or name an input that the call doesn't have.
    """
    inputs = [name for name, value in kwargs.items() if not is_constant(value)]
    if not isinstance(shapes, Mapping):
        raise ExportError(
            f"dynamic_shapes is a dict with an entry per input ({', '.join(inputs)}), not {type(shapes).__name__}.",
            stage=STAGE,
        )
    for name in shapes:
        if name not in inputs:
            near = difflib.get_close_matches(str(name), inputs, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ExportError(
                f"dynamic_shapes names {name!r}, which is none of the inputs.{hint} Inputs: {', '.join(inputs)}.",
                stage=STAGE,
            )
    given = dict(shapes)
    if "attention_mask" in kwargs and "attention_mask" not in (*given, *supplied) and "input_ids" in given:
        given["attention_mask"] = given["input_ids"]  # the mask that was added goes along with its tokens
    return {name: given[name] if name in given else static(kwargs[name]) for name in inputs}


def static(value: Any) -> Any:
    """The entry for an input all of whose axes are fixed."""
    leaves, spec = structure.flatten(value)
    if spec.is_leaf():
        return None
    # an axis-free mark per leaf, in the nesting of the value
    if type(value) is dict:
        return {key: static(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(static(inner) for inner in value)
    return [None] * len(leaves)


def open_axes(shapes: Any, kwargs: Mapping[str, Any]) -> dict[str, dict[int, Any]]:
    """Leaf -> {axis index: what the user said of it}, of the axes that the user wants open.

    Args:
        shapes: As `checked_shapes` returns it.
        kwargs: The prepared kwargs.
    """
    opened: dict[str, dict[int, Any]] = {}
    for kwarg, spec in shapes.items():
        leaves = structure.flatten_named({kwarg: kwargs[kwarg]})
        specs = [spec] if len(leaves) == 1 else pytree.tree_leaves(spec, is_leaf=_is_axes)
        for (name, leaf), own in zip(leaves, specs, strict=False):
            if isinstance(leaf, torch.Tensor) and (marked := dict(_marks(own))):
                opened[name] = marked
    return opened


def _is_axes(spec: Any) -> bool:
    """Whether a part of the shapes describes the axes of one tensor."""
    if isinstance(spec, Mapping):
        return all(isinstance(key, int) for key in spec)
    return spec is None or (isinstance(spec, (tuple, list)) and all(_is_mark(item) for item in spec))


def _is_mark(item: Any) -> bool:
    return item is None or isinstance(item, int) or hasattr(item, "__name__") or "Dim" in type(item).__name__


def _marks(own: Any) -> Iterator[tuple[int, Any]]:
    pairs = (
        own.items() if isinstance(own, Mapping) else enumerate(own) if isinstance(own, (tuple, list)) else ()
    )
    static_mark = torch.export.Dim.STATIC
    yield from (
        (dim, mark)
        for dim, mark in pairs
        if mark is not None and mark is not static_mark and not isinstance(mark, int)
    )


def enlarged(model: Any, kwargs: dict[str, Any], shapes: Any) -> dict[str, Any]:
    """The kwargs at sizes that torch.export does not freeze, where the user wants an axis open that is 0 or 1 long.

    Args:
        model: The model, guarded by `untouched`.
        kwargs: The prepared kwargs.
        shapes: As `checked_shapes` returns it.

    Returns:
        Larger kwargs that the model takes; those given where nothing is too small, or no larger ones are taken.
    """
    opened = open_axes(shapes, kwargs)
    leaves = tensor_leaves(kwargs)
    small = {(leaf, dim) for leaf, dims in opened.items() for dim in dims if leaves[leaf].shape[dim] < 2}
    if not small:
        return kwargs
    probe = Probe(model, kwargs)
    layout = propose(leaves, probe.special)
    grow = {term for leaf, dim in small for term in layout.axes.get(leaf, {}).get(dim, ())}
    # a group grows as a whole, so all of its axes must be open
    for leaf, dims in layout.axes.items():
        for dim, terms in dims.items():
            if dim not in opened.get(leaf, {}):
                grow -= set(terms)
    copies = 2 if any(layout.groups[name].kind == "lead" for name in grow) else 1
    sizes = {name: 3 for name in grow if layout.groups[name].kind != "lead"}
    grown = resized(leaves, layout.only(grow), sizes, copies, probe.special)
    try:
        probe.run(grown)
    except Exception:  # noqa: BLE001  then the trace says what is wrong with the sample
        return kwargs
    return rebuilt(kwargs, grown)
