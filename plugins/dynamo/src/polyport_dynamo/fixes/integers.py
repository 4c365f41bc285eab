"""`int()` and `len()` of something symbolic freeze a size."""

from __future__ import annotations

import builtins
from typing import Any

import torch

from polyport.patching import Patch, Target

_NAMESPACE = "polyport_dynamo.fixes.namespace:modeling"


class _SymbolicInt(type):
    """Makes a class that acts as `int` for everything but symbolic numbers."""

    def __call__(cls, *args: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], (torch.SymInt, torch.SymFloat)):
            return torch.sym_int(args[0])  # type: ignore[no-untyped-call]
        return builtins.int(*args)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, builtins.int)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, builtins.int)


class SymbolicInt(int, metaclass=_SymbolicInt):
    """`int`, except that the size of an open axis stays symbolic."""


def _len(_: Any) -> Any:
    def symbolic_len(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() and isinstance(value.shape[0], torch.SymInt):
            return value.shape[0]
        return builtins.len(value)

    return symbolic_len


def _equal(left: Any, right: Any) -> bool:
    """Whether two sizes are the same whatever the axes are."""
    return isinstance(left, torch.SymInt) and bool(left.node.expr == right.node.expr)


def _range(_: Any) -> Any:
    def symbolic_range(*args: Any) -> Any:
        # one chunk as long as the whole: `range(0, length, length)`
        if len(args) == 3 and isinstance(args[2], torch.SymInt) and args[0] == 0 and _equal(*args[1:]):
            return [0]
        return builtins.range(*args)

    return symbolic_range


def _torch_int(_: Any) -> Any:
    def torch_int(x: Any) -> Any:
        return SymbolicInt(x)

    return torch_int


def _torch_float(_: Any) -> Any:
    def torch_float(x: Any) -> Any:
        if isinstance(x, (torch.SymInt, torch.SymFloat)):
            return torch.sym_float(x)  # type: ignore[no-untyped-call]
        return float(x)

    return torch_float


def _reproduce() -> None:
    from transformers.models.moonshine.modeling_moonshine import MoonshinePreTrainedModel

    class Lengths(torch.nn.Module):
        def forward(self, audio: torch.Tensor) -> torch.Tensor:
            lengths: Any = MoonshinePreTrainedModel._get_feat_extract_output_lengths
            count = lengths(self, audio.shape[1])
            return audio[:, :count]

    shapes = {"audio": {1: torch.export.Dim.AUTO}}
    program = torch.export.export(Lengths(), (torch.zeros(2, 4000),), dynamic_shapes=shapes)
    program.module()(torch.zeros(2, 6000))


PATCH = Patch(
    id="transformers-int-of-size",
    targets=(
        Target(f"{_NAMESPACE}.int", lambda _: SymbolicInt),
        Target(f"{_NAMESPACE}.len", _len),
        Target(f"{_NAMESPACE}.range", _range),
        Target(f"{_NAMESPACE}.torch_int", _torch_int),
        Target(f"{_NAMESPACE}.torch_float", _torch_float),
    ),
    reason=(
        "Modeling code rounds sizes with int() and takes them with len(), which must return Python integers, so the "
        "image size or audio length of the sample becomes part of the graph (MobileNetV2, MobileViT, Moonshine, BEiT, RT-DETR...). While tracing, they "
        "give a symbolic number."
    ),
    upstream="unreported",
    affects={"transformers": ">=5.20,<6"},
    reproduce=_reproduce,
)
