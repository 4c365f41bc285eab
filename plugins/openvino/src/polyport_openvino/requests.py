"""Infer requests: what executes a compiled model, one call at a time each, on memory that is there already."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import openvino as ov
import torch

from polyport.errors import InputError
from polyport_openvino.buffers import CARRIERS, to_openvino, to_torch
from polyport_openvino.messages import reason


@attrs.frozen
class Output:
    """One output of a compiled model, prepared: what a fresh tensor for it is made of."""

    index: int
    kind: ov.Type
    #: Its sizes; 0 where they are known only after a call, which makes the tensor grow.
    shape: ov.Shape
    #: Whether numpy has its type.
    plain: bool

    @classmethod
    def of(cls, compiled: ov.CompiledModel, index: int) -> Output:
        """The output of a compiled model at an index."""
        port = compiled.outputs[index]
        sizes = port.get_partial_shape()
        known = (
            [] if sizes.rank.is_dynamic else [size.get_length() if size.is_static else 0 for size in sizes]
        )
        kind = port.get_element_type()
        return cls(index, kind, ov.Shape([0] if sizes.rank.is_dynamic else known), kind not in CARRIERS)


class BoundRequest:
    """An infer request with what is bound to it at present. Only one call at a time may use it.

    Inputs are bound by their address, and again only where that, the sizes or the type have changed: that takes 0.3 microseconds
    an input in place of 2.7. The request holds addresses, and keeps no input alive.

    Args:
        request: The request.
        inputs: For every tensor of a call the index of the model's input.
        outputs: The outputs that a call returns, each in memory of its own.
        reused: Indices of outputs that are read before the next call, and stay in the request's memory.
    """

    __slots__ = ("_bound", "_inputs", "_outputs", "_ready", "_reused", "request")

    def __init__(
        self,
        request: ov.InferRequest,
        inputs: Sequence[int],
        outputs: Sequence[Output],
        reused: Sequence[int] = (),
    ) -> None:
        self.request = request
        self._inputs, self._outputs, self._reused = tuple(inputs), tuple(outputs), tuple(reused)
        self._bound: list[Any] = [None] * len(self._inputs)
        self._fresh()

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run once.

        Args:
            inputs: Tensors on the CPU, contiguous, of the model's types.

        Returns:
            The outputs, then those that are reused, which are valid until the next call.

        Raises:
            InputError: OpenVINO can't compute with these inputs.
        """
        request, bound = self.request, self._bound
        try:
            for index, tensor in enumerate(inputs):
                place = (tensor.data_ptr(), tensor.shape, tensor.dtype)
                if place != bound[index]:
                    request.set_input_tensor(self._inputs[index], to_openvino(tensor))
                    # an empty tensor has no address that tells it from another one
                    bound[index] = place if tensor.numel() else None
            request.infer(share_outputs=True)
        except RuntimeError as error:
            bound[:] = [None] * len(bound)
            raise InputError(
                f"OpenVINO can't run the graph on these inputs: {reason(error)}",
                stage="run",
                backend="openvino",
            ) from error
        results = [
            torch.from_numpy(tensor.data) if output.plain else to_torch(tensor)
            for output, tensor in zip(self._outputs, self._ready, strict=True)
        ]
        results += [to_torch(request.get_output_tensor(index)) for index in self._reused]
        self._fresh()
        return results

    def _fresh(self) -> None:
        """Bind new memory to the outputs; the request lets go of that of the last call, which is the caller's."""
        self._ready = [ov.Tensor(output.kind, output.shape) for output in self._outputs]
        for output, tensor in zip(self._outputs, self._ready, strict=True):
            self.request.set_output_tensor(output.index, tensor)


class RequestPool:
    """The requests of a compiled model: one for every call that runs at present, kept for the calls after it.

    Args:
        make: Makes one.
    """

    def __init__(self, make: Callable[[], BoundRequest]) -> None:
        self._make = make
        self._free: deque[BoundRequest] = deque()

    def take(self) -> BoundRequest:
        """A request that nobody uses."""
        try:
            return self._free.pop()
        except IndexError:
            return self._make()

    def give_back(self, request: BoundRequest) -> None:
        """Hand a request back after a call that went well; one after a failed call is left to itself."""
        self._free.append(request)
