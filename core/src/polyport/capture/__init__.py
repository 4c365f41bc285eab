"""Turning a call of a model into one that can be traced.

The inputs are checked, copied and completed (`prepare`), their axes are grouped by what they count (`layout`), and the
model itself is asked, at other sizes (`resize`), which of them vary (`probe`). The caller's model stays as it is (`keep`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from polyport import structure
from polyport.capture.buffers import true_lengths
from polyport.capture.defaults import complete, sized
from polyport.capture.keep import untouched
from polyport.capture.prepare import check_model, is_constant, plain_kwargs, tensor_leaves
from polyport.capture.probe import Found, Probe, rebuilt
from polyport.capture.shapes import checked_shapes, enlarged, open_axes
from polyport.config import ExportConfig
from polyport.metadata import AxisRange
from polyport.pipeline import CapturedCall

__all__ = ["capture", "is_constant", "open_axes", "rebuilt", "tensor_leaves", "true_lengths", "untouched"]


def capture(
    model: Any, inputs: Mapping[str, Any], config: ExportConfig, pinned: frozenset[str] = frozenset()
) -> CapturedCall:
    """Make a call of the model ready for tracing.

    With `config.dynamic`, the model is run a few times at other sizes to learn which axes vary, and the call comes back
    enlarged to sizes that no trace freezes.

    Args:
        model: The model, or a part of it; it comes back unchanged, also after an error.
        inputs: Forward kwargs; they come back unchanged.
        config: The export config.
        pinned: Names of axes that keep the sample's size.

    Returns:
        The captured call.

    Raises:
        ExportError: The model or the inputs can't be exported.
        InputError: An input is unknown or missing, or the model itself fails on the inputs.
    """
    check_model(model)
    kwargs = plain_kwargs(model, inputs)
    with untouched(model):
        kwargs, defaults = complete(model, kwargs)
        if config.dynamic_shapes is not None:
            shapes = checked_shapes(config.dynamic_shapes, kwargs, inputs.keys())
            return CapturedCall(
                model=model,
                kwargs=enlarged(model, kwargs, shapes),
                dynamic_shapes=shapes,
                defaults={name: rule for name, rule in defaults.items() if ":" in rule},
                sample=kwargs,
            )
        probe = Probe(model, kwargs)
        if not config.dynamic:
            probe.base()
            return CapturedCall(
                model=model, kwargs=kwargs, defaults=sized(defaults, kwargs, {}), sample=kwargs
            )
        found = probe.find(pinned)
    return _dynamic_call(model, kwargs, defaults, found)


def _dynamic_call(
    model: Any, kwargs: Mapping[str, Any], defaults: Mapping[str, str], found: Found
) -> CapturedCall:
    axes = {
        leaf: {dim: "+".join(terms) for dim, terms in sorted(dims.items())}
        for leaf, dims in found.layout.axes.items()
        if dims
    }
    names = {name for dims in axes.values() for name in dims.values() if "+" not in name}
    ranges = {name: AxisRange(min=0 if name == "past" else 1) for name in sorted(names)}
    return CapturedCall(
        model=model,
        kwargs=rebuilt(kwargs, found.leaves),
        dynamic_shapes=auto_shapes(kwargs, axes),
        axes=axes,
        ranges=ranges,
        defaults=sized(defaults, kwargs, axes),
        sample=kwargs,
    )


def auto_shapes(kwargs: Mapping[str, Any], axes: Mapping[str, Mapping[int, str]]) -> dict[str, Any]:
    """`dynamic_shapes` that leave the listed axes to torch.export and fix all others.

    `Dim.AUTO` is used, since torch.export then finds the relations between axes itself; whether an axis stayed free is
    checked after the trace.
    """
    auto = torch.export.Dim.AUTO
    shapes = {}
    for name, value in kwargs.items():
        if is_constant(value):
            continue
        leaves, spec = structure.flatten(value)
        named = [leaf_name for leaf_name, _ in structure.flatten_named({name: value})]
        marked = [
            dict.fromkeys(axes.get(leaf_name, {}), auto) if isinstance(leaf, torch.Tensor) else None
            for leaf_name, leaf in zip(named, leaves, strict=True)
        ]
        shapes[name] = marked[0] if spec.is_leaf() else _nested(value, marked)
    return shapes


def _nested(value: Any, marked: list[Any]) -> Any:
    """The marks in the nesting torch.export wants: containers as they are, caches as the list of their leaves."""
    from torch.utils import _pytree as pytree

    children, _ = pytree.tree_flatten(value, is_leaf=lambda x: x is not value)
    rest = iter(marked)

    def take(child: Any) -> Any:
        leaves, spec = structure.flatten(child)
        if spec.is_leaf():
            return next(rest)
        own = [next(rest) for _ in leaves]
        return _nested(child, own)

    parts = [take(child) for child in children]
    if type(value) is dict:
        return dict(zip(value, parts, strict=True))
    return tuple(parts) if type(value) is tuple else parts  # a list for a cache and a ModelOutput too
