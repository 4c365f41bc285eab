"""Running a model whose caches are variables: they stay in an infer request, and a call returns tensors that stand for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import openvino as ov
import torch

from polyport.caches import find_dtype
from polyport.errors import InputError
from polyport.held import HeldTensor, plain_tensor
from polyport.metadata import ExportMetadata, TensorInfo
from polyport.sizes import compiled
from polyport_openvino.runner import to_openvino, to_torch
from polyport_openvino.stateful import variables_of


class _Lease:
    """An infer request, while anything stands for what is in its variables.

    Args:
        request: The request.
        free: Where it goes afterwards.
    """

    def __init__(self, request: ov.InferRequest, free: deque[ov.InferRequest]) -> None:
        self.request, self._free = request, free
        self.lock = threading.RLock()
        #: Steps that were taken, and the last of them that moved or replaced rows.
        self.step = self.moved = 0
        self.states = {state.name: state for state in request.query_state()}

    def __del__(self) -> None:
        self._free.append(self.request)


class _Kept:
    """The variables of a request as they were after one of its steps (see `polyport.held.Keeper`)."""

    def __init__(self, runner: Any, lease: _Lease, shapes: Sequence[tuple[int, ...]]) -> None:
        self.runner, self.lease, self.step, self.shapes = runner, lease, lease.step, shapes

    def read(self, key: int) -> torch.Tensor:
        """A copy of a variable. What grows is found at the start of what it has grown to.

        Raises:
            InputError: A later step has moved its rows, or overwritten it.
        """
        shape, lease = self.shapes[key], self.lease
        with lease.lock:
            content = self.runner.states.content(lease.request, key)
            if lease.step == self.step:
                return content
            axis = self.runner.states.growing[key]
            if axis is None or lease.moved > self.step:
                raise InputError(
                    "This cache was continued, and what it was before is gone: OpenVINO keeps it in one place. Copy it "
                    "before it is continued (copy.deepcopy(cache)), or export with stateful=False.",
                    stage="run",
                )
            return content.narrow(axis, 0, shape[axis]).clone()


class States:
    """The variables of one compiled model.

    Args:
        metadata: The record of the model.
        create: Makes an infer request.
    """

    def __init__(self, metadata: ExportMetadata, create: Callable[[], ov.InferRequest]) -> None:
        self.names = variables_of(metadata)
        inputs = {info.name: (index, info) for index, info in enumerate(metadata.inputs)}
        outputs = {info.name: info for info in metadata.outputs}
        #: Of each variable: its place among the inputs of a call, and the axis along which it grows.
        self.places = [inputs[name][0] for name in self.names]
        self.growing = [_growing(inputs[name][1], outputs[name]) for name in self.names]
        self._dtypes = [find_dtype(outputs[name].dtype) for name in self.names]
        self._shapes = [outputs[name].shape for name in self.names]
        self._sizes = {
            size: compiled(size) for shape in self._shapes for size in shape if isinstance(size, str)
        }
        self._sources: dict[str, tuple[int, int]] = {}
        for index, info in enumerate(metadata.inputs):
            for axis, size in enumerate(info.shape):
                if isinstance(size, str):
                    self._sources.setdefault(size, (index, axis))
        self._create = create
        self._free: deque[ov.InferRequest] = deque()
        self._orders: dict[int, torch.Tensor] = {}

    def content(self, request: ov.InferRequest, key: int) -> torch.Tensor:
        """A copy of what a variable holds."""
        state = next(state for state in request.query_state() if state.name == self.names[key])
        return to_torch(state.state).clone()

    def lease(self, runner: Any, inputs: Sequence[torch.Tensor]) -> tuple[_Lease, torch.Tensor]:
        """The request that a call continues, or a free one with the caches that the call brings.

        Args:
            runner: Who calls.
            inputs: Of the call.

        Returns:
            The lease, locked; and the rows that the call continues from (int32).
        """
        given = [inputs[place] for place in self.places]
        first: Any = given[0]
        if isinstance(first, HeldTensor) and first.keeper.runner is runner:
            kept: Any = first.keeper
            lease: _Lease = kept.lease
            lease.lock.acquire()
            rows = first.rows
            if lease.step == kept.step and all(
                isinstance(one, HeldTensor)
                and one.keeper is kept
                and one.key == key
                and _equal(one.rows, rows)
                for key, one in enumerate(given)
            ):
                whole = kept.shapes[0][0]
                if rows is None:
                    return lease, self._order(whole)
                if len(rows) == whole:
                    lease.moved = lease.step + 1
                    return lease, rows.to(torch.int32).contiguous()
            lease.lock.release()
        contents = [plain_tensor(one) for one in given]
        lease = _Lease(self._free.pop() if self._free else self._create(), self._free)
        lease.lock.acquire()
        lease.request.reset_state()
        for name, content in zip(self.names, contents, strict=True):
            if content.numel():
                lease.states[name].state = to_openvino(content)
        return lease, self._order(len(contents[0]))

    def kept(
        self, runner: Any, lease: _Lease, inputs: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What stands for the variables after a step.

        Args:
            runner: Who called.
            lease: The request.
            inputs: Of the call.
        """
        sizes = {name: inputs[index].shape[axis] for name, (index, axis) in self._sources.items()}
        sizes |= {name: size(sizes) for name, size in self._sizes.items()}
        known: dict[tuple[int | str, ...], tuple[int, ...]] = {}
        for shape in self._shapes:
            if shape not in known:
                known[shape] = tuple(size if isinstance(size, int) else sizes[size] for size in shape)
        shapes = [known[shape] for shape in self._shapes]
        keeper = _Kept(runner, lease, shapes)
        return {
            name: HeldTensor(keeper, key, shapes[key], self._dtypes[key])  # type: ignore[arg-type]
            for key, name in enumerate(self.names)
        }

    def _order(self, rows: int) -> torch.Tensor:
        """All rows as they are."""
        if rows not in self._orders:
            self._orders[rows] = torch.arange(rows, dtype=torch.int32)
        return self._orders[rows]


def _growing(before: TensorInfo, after: TensorInfo) -> int | None:
    """The one axis along which an output is longer than its input; None for a state of fixed size."""
    changed = [axis for axis, (a, b) in enumerate(zip(before.shape, after.shape, strict=True)) if a != b]
    return changed[0] if len(changed) == 1 else None


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


