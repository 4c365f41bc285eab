"""What is in the variables of a model: which infer request has which cache, and the tensors that stand for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from polyport.errors import ArtifactError, InputError
from polyport.held import HeldTensor, left_by, plain_tensor
from polyport.metadata import ExportMetadata
from polyport_dynamo.lowering.caches import KeptCaches
from polyport_openvino.buffers import to_openvino, to_torch
from polyport_openvino.requests import BoundRequest
from polyport_openvino.stateful import variables_of


class Lease:
    """An infer request, as long as anything stands for what is in its variables. Entered for a step.

    Args:
        request: The request.
        free: Where it goes afterwards.
    """

    def __init__(self, request: BoundRequest, free: deque[BoundRequest]) -> None:
        self.request, self._free = request, free
        self.lock = threading.RLock()
        #: Steps that were taken, and the last of them that moved rows or failed.
        self.step = self.moved = 0
        self.states = {state.name: state for state in request.request.query_state()}

    def __enter__(self) -> None:
        self.step += 1  # first, so that what a failed step leaves is not taken for what was there before

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self.moved = self.step
        self.lock.release()

    def __del__(self) -> None:
        self._free.append(self.request)


class _Kept:
    """The variables of a request as they were after one of its steps (see `polyport.held.Keeper`)."""

    def __init__(self, runner: Any, lease: Lease, shapes: Sequence[tuple[int, ...]]) -> None:
        self.runner, self.lease, self.step, self.shapes = runner, lease, lease.step, shapes

    def read(self, key: int) -> torch.Tensor:
        """A copy of a variable. What grows is found at the start of what it has grown to.

        Raises:
            InputError: A later step has moved its rows, or overwritten it.
        """
        lease, states = self.lease, self.runner.states
        with lease.lock:
            axis = states.growing[key]
            if lease.step != self.step and (axis is None or lease.moved > self.step):
                raise InputError(
                    "This cache was continued, and what it was before is gone: OpenVINO keeps it in one place. Copy it "
                    "before it is continued (copy.deepcopy(cache)), or export with stateful=False.",
                    stage="run",
                )
            content: torch.Tensor = to_torch(lease.states[states.names[key]].state)
            if lease.step != self.step:
                content = content.narrow(axis, 0, self.shapes[key][axis])
            return content.clone()


class States:
    """The variables of one compiled model.

    Args:
        metadata: The record of the model.
        make_request: Makes an infer request of the model.

    Raises:
        ArtifactError: The model has other variables than the record says.
    """

    def __init__(self, metadata: ExportMetadata, make_request: Callable[[], BoundRequest]) -> None:
        self.names = variables_of(metadata)
        self._make_request = make_request
        self._free: deque[BoundRequest] = deque([make_request()])
        there = {state.name for state in self._free[0].request.query_state()}
        if there != set(self.names):
            raise ArtifactError(
                f"The graph keeps {', '.join(sorted(there)) or 'nothing'} in variables, the export's metadata names "
                f"{', '.join(self.names)}.",
                stage="load",
                backend="openvino",
            )
        self._caches = KeptCaches(metadata, self.names)
        #: The axis along which a variable grows; None for a state of fixed size.
        self.growing = self._caches.growing
        self._orders: dict[int, torch.Tensor] = {}

    def lease(self, runner: Any, inputs: Sequence[torch.Tensor]) -> tuple[Lease, torch.Tensor]:
        """The request that a call continues, or a free one with the caches that the call brings.

        Args:
            runner: Who calls.
            inputs: Of the call.

        Returns:
            The lease, locked, to be entered for the step; and the rows that the call continues from (int32).

        Raises:
            InputError: A cache was continued since, and can't be found any more.
        """
        given = [inputs[place] for place in self._caches.places]
        if (found := self._continued(runner, given)) is not None:
            return found
        contents = [plain_tensor(one) for one in given]
        try:
            request = self._free.pop()
        except IndexError:
            request = self._make_request()
        request.request.reset_state()
        lease = Lease(request, self._free)
        for name, content in zip(self.names, contents, strict=True):
            if content.numel():
                lease.states[name].state = to_openvino(content.contiguous())
        lease.lock.acquire()
        return lease, self._order(len(contents[0]))

    def _continued(self, runner: Any, given: Sequence[Any]) -> tuple[Lease, torch.Tensor] | None:
        """The lease and the rows, where all caches of a call are as one step of it has left them."""
        left = left_by(runner, given)
        if left is None:
            return None
        kept, rows = left
        lease: Lease = kept.lease
        count = kept.shapes[0][0]
        if rows is not None and len(rows) != count:
            return None
        lease.lock.acquire()
        if lease.step != kept.step:
            lease.lock.release()
            return None
        if rows is None:
            return lease, self._order(count)
        lease.moved = lease.step + 1
        return lease, rows.to(torch.int32).contiguous()

    def kept(self, runner: Any, lease: Lease, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that stand for the variables after a step, in the order of `names`.

        Args:
            runner: Who called.
            lease: The request.
            inputs: Of the call.
        """
        shapes = self._caches.shapes(inputs)
        keeper = _Kept(runner, lease, shapes)
        return [
            HeldTensor(keeper, key, shape, dtype)
            for key, (shape, dtype) in enumerate(zip(shapes, self._caches.dtypes, strict=True))
        ]

    def _order(self, rows: int) -> torch.Tensor:
        """All rows as they are."""
        if rows not in self._orders:
            self._orders[rows] = torch.arange(rows, dtype=torch.int32)
        return self._orders[rows]
