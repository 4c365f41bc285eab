"""Calling an exported graph the way the model is called.

A :class:`Caller` is made once per component and then used for every call, so what can be prepared is prepared: a call
walks one flat list, converts what needs converting, and checks ranks, sizes and shared axes, because a runtime would answer
a wrong size with a message about its own internals, or not at all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from polyport import structure
from polyport.caches import find_dtype
from polyport.config import plain
from polyport.errors import InputError
from polyport.fills import Fill
from polyport.held import HeldTensor, plain_tensor
from polyport.metadata import ExportMetadata, TensorInfo
from polyport.pipeline import Runner
from polyport.results import Results
from polyport.sizes import compiled

#: Longest axis of an input that is made: far above any model's, low enough not to fill the memory.
_LONGEST = 2**24

#: Shape of a tensor about which a manifest of another tool says nothing.
UNKNOWN = ("...",)


@attrs.frozen
class _Slot:
    """One graph input, prepared: where its value is found and what it must be."""

    info: TensorInfo
    kwarg: str
    dtype: torch.dtype | None
    #: (axis, size) of the fixed axes, (axis, name) of the named ones.
    fixed: tuple[tuple[int, int], ...]
    named: tuple[tuple[int, str], ...]
    rank: int | None


class Caller:
    """One component, callable with forward kwargs.

    Args:
        metadata: The record of the component.
        runner: What executes it.
    """

    def __init__(self, metadata: ExportMetadata, runner: Runner) -> None:
        self.metadata = metadata
        self.runner = runner
        self._device = torch.device(runner.device)
        self._slots = tuple(_slot(info) for info in metadata.inputs)
        self._nested = {slot.kwarg for slot in self._slots if slot.kwarg != slot.info.name}
        self._known = {slot.kwarg for slot in self._slots}
        self._names = {slot.info.name for slot in self._slots}
        self._defaults = {name: Fill.read(rule) for name, rule in metadata.defaults.items()}
        self._ranges = {
            name: (span.min, span.max)
            for name, span in metadata.axes.items()
            if span.min > 0 or span.max is not None
        }
        # an axis named "past+sequence" covers both, one after the other
        self._sums = {name: compiled(name) for slot in self._slots for _, name in slot.named if "+" in name}
        self.results = Results(metadata)
        self._changed = [
            (i, name) for i, name in enumerate(metadata.input_names) if name in metadata.in_place
        ]
        self._warned: set[str] = set()

    def __call__(self, kwargs: Mapping[str, Any]) -> Any:
        """Run the graph.

        Args:
            kwargs: What the model's forward takes: tensors, arrays, lists, caches.

        Returns:
            What the model returns: the same class, fields and nesting.

        Raises:
            InputError: An input is missing or doesn't fit; the message lists what the graph takes.
        """
        if not self._known.issuperset(kwargs):
            self._drop_unknown(kwargs)
        return self.results.value(*self.run(self._leaves(kwargs) if self._nested else kwargs))

    def run(self, leaves: Mapping[str, Any]) -> tuple[Sequence[torch.Tensor], dict[str, int]]:
        """Run the graph on the leaves of a call.

        Args:
            leaves: Tensors, arrays or lists by dotted name.

        Returns:
            The tensors that come out, in the order of `metadata.outputs`, and the sizes of the named axes.

        Raises:
            InputError: As for a call.
        """
        sizes: dict[str, int] = {}
        tensors = self._tensors(leaves, sizes)
        self._check_sizes(sizes)
        outputs = self.runner(tensors)
        for index, name in self._changed:
            own = leaves.get(name)
            if own is not tensors[index] and isinstance(own, torch.Tensor):
                own.copy_(tensors[index])  # it couldn't be taken as it was, but the caller sees the change
        return outputs, sizes

    def _tensors(self, leaves: Mapping[str, Any], sizes: dict[str, int]) -> list[torch.Tensor]:
        """The inputs of the graph; `sizes` gets those of their axes."""
        tensors: list[Any] = []
        late: list[tuple[int, _Slot]] = []
        checked: set[Any] = set()
        for index, slot in enumerate(self._slots):
            value: Any = leaves.get(slot.info.name)
            if type(value) is HeldTensor and (value.keeper, slot.info.shape) in checked:
                tensors.append(value)  # of the same step and kind as one that was checked
                continue
            if value is None:
                value = self._fill(slot, leaves)
                if value is None:
                    late.append((index, slot))
                    tensors.append(None)
                    continue
            held = type(value) is HeldTensor and value.keeper.runner is self.runner
            if (
                (type(value) is not torch.Tensor and not held)
                or value.dtype is not slot.dtype
                or value.device != self._device
                or value.requires_grad
            ):
                value = self._convert(slot, value)
            self._check(slot, value, sizes)
            tensors.append(value if value.is_contiguous() else value.contiguous())
            if held:
                checked.add((value.keeper, slot.info.shape))
        for index, slot in late:
            tensors[index] = self._made(slot, sizes)
        return tensors

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        for name, total in self._sums.items():
            if name in sizes and sizes[name] != (wanted := self._size(total, sizes)):
                raise self._error(
                    f"the axis {name!r} has size {sizes[name]}, but its parts add up to {wanted}"
                )
        for name, (low, high) in self._ranges.items():
            size = sizes.get(name, low)
            if size < low or (high is not None and size > high):
                raise self._error(f"the axis {name!r} has size {size}, which must be {_span(low, high)}")

    # ── inputs ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _drop_unknown(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse constants that differ from the traced ones; warn once about other kwargs, which are left out."""
        for name in kwargs.keys() - self._known:
            value = kwargs[name]
            if value is None:
                continue
            if name in self.metadata.in_constants:
                traced = self.metadata.in_constants[name]
                if isinstance(value, torch.Tensor) or plain(value) != traced:
                    raise self._error(
                        f"{name!r} was traced as the constant {traced!r} and can't be {value!r}"
                    )
            elif name not in self._warned:
                self._warned.add(name)
                warnings.warn(
                    f"{name!r} is no input of this export and is left out.", UserWarning, stacklevel=4
                )

    def _leaves(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The leaves of containers by their names, the other kwargs as they are."""
        leaves = {name: value for name, value in kwargs.items() if name not in self._nested}
        nested = {name: value for name, value in kwargs.items() if name in self._nested and value is not None}
        for name, leaf in structure.flatten_named(nested):
            # a cache with more layers than the traced one would otherwise lose them without a word
            if name not in self._names and leaf is not None:
                raise self._error(f"{name!r} is no input of this export")
            leaves[name] = leaf
        return leaves

    def _fill(self, slot: _Slot, leaves: Mapping[str, Any]) -> torch.Tensor | None:
        """What stands for an input that was left out; None where that takes the sizes of the others (see `_made`)."""
        rule = self._defaults.get(slot.info.name)
        if rule is not None and not rule.like:
            return None
        found = None if rule is None else leaves.get(rule.like)
        if rule is None or found is None:
            raise self._error(f"the input {slot.info.name!r} is missing")
        like = torch.as_tensor(found)
        return torch.full(like.shape, rule.value, dtype=slot.dtype, device=self._device)

    def _made(self, slot: _Slot, sizes: dict[str, int]) -> torch.Tensor:
        rule = self._defaults[slot.info.name]
        shape = [self._size(size, sizes) for size in rule.shape]
        if not all(0 <= size <= _LONGEST for size in shape):
            raise self._error(
                f"the input {slot.info.name!r}, which was left out, would be of the sizes {shape}"
            )
        if rule.counts:
            made = torch.arange(shape[0], dtype=slot.dtype, device=self._device)
        else:
            made = torch.full(shape, rule.value, dtype=slot.dtype, device=self._device)
        self._check(slot, made, sizes)
        return made

    def _size(self, size: Callable[[Mapping[str, int]], int], sizes: Mapping[str, int]) -> int:
        try:
            return size(sizes)
        except KeyError as error:
            raise self._error(f"nothing among the inputs says how long the axis {error} is") from error
        except ZeroDivisionError as error:
            raise self._error("a size of an input that was left out can't be computed") from error

    def _convert(self, slot: _Slot, value: Any) -> torch.Tensor:
        """`value` as a tensor of the traced dtype on the runner's device, wherever eager would take it too."""
        value = plain_tensor(value)
        if not isinstance(value, torch.Tensor):
            try:
                value = _from_numpy(value) if isinstance(value, np.ndarray) else torch.as_tensor(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise self._error(
                    f"{slot.info.name!r} is no tensor, array or list of numbers ({error})"
                ) from error
        if slot.dtype is not None and value.dtype != slot.dtype:
            if _kind(value.dtype) > _kind(slot.dtype):
                wanted, got = slot.info.dtype, str(value.dtype).removeprefix("torch.")
                raise self._error(f"{slot.info.name!r} must be {wanted}, not {got}")
            value = value.to(slot.dtype)
        tensor: torch.Tensor = value.detach()
        return tensor if tensor.device == self._device else tensor.to(self._device)

    def _check(self, slot: _Slot, value: torch.Tensor, sizes: dict[str, int]) -> None:
        if slot.rank is None:
            return
        shape = value.shape
        if len(shape) != slot.rank:
            raise self._error(f"{slot.info.name!r} has {len(shape)} axes {list(shape)}, not {slot.rank}")
        for axis, size in slot.fixed:
            if shape[axis] != size:
                raise self._error(
                    f"axis {axis} of {slot.info.name!r} has size {shape[axis]}, which must be {size}"
                )
        for axis, name in slot.named:
            if sizes.setdefault(name, shape[axis]) != shape[axis]:
                raise self._error(
                    f"axis {axis} of {slot.info.name!r} has size {shape[axis]}, but the axis {name!r} has size "
                    f"{sizes[name]} in the inputs before it"
                )

    def _error(self, problem: str) -> InputError:
        names = ", ".join(describe(info) for info in self.metadata.inputs)
        optional = f" (may be left out: {', '.join(self._defaults)})" if self._defaults else ""
        return InputError(
            f"{problem[0].upper()}{problem[1:]}. The export takes: {names}{optional}.", stage="run"
        )


def describe(info: TensorInfo) -> str:
    """One tensor in words: `input_ids int64[batch, sequence]`."""
    return f"{info.name} {info.dtype}[{', '.join(map(str, info.shape))}]".replace(" [", " ")


def _span(low: int, high: int | None) -> str:
    return f"at least {low}" if high is None else f"between {low} and {high}"


def _slot(info: TensorInfo) -> _Slot:
    known = info.shape != UNKNOWN
    return _Slot(
        info=info,
        kwarg=info.name.partition(".")[0],
        dtype=find_dtype(info.dtype) if info.dtype else None,
        fixed=tuple((i, size) for i, size in enumerate(info.shape) if isinstance(size, int)) if known else (),
        named=tuple((i, size) for i, size in enumerate(info.shape) if isinstance(size, str) and size != "?")
        if known
        else (),
        rank=len(info.shape) if known else None,
    )


def _from_numpy(array: np.ndarray) -> torch.Tensor:
    # torch can share neither an array that must not be written to nor one that runs backwards
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)


def _kind(dtype: torch.dtype) -> int:
    """Bool and integers convert to anything, floats to floats, complex numbers to complex numbers."""
    return 2 if dtype.is_complex else 1 if dtype.is_floating_point else 0
