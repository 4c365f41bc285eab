"""Running a model with OpenVINO."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import openvino as ov
import torch

from polyport.metadata import ExportMetadata
from polyport.pipeline import RunRequest
from polyport_dynamo.lowering import Leaves
from polyport_openvino.devices import core


class ModelRunner:
    """Executes one model, which any number of threads may share.

    Args:
        model: The model.
        metadata: The record of the model.
        request: Device and options.
    """

    def __init__(self, model: ov.Model, metadata: ExportMetadata, request: RunRequest) -> None:
        options = request.take(config=None, torch_threads=None)
        self.device = "cpu"
        config = {"INFERENCE_PRECISION_HINT": "f32", **(options["config"] or {})}
        self.compiled = core().compile_model(model, "CPU", config)
        leaves = Leaves.of(metadata)
        self._free: deque[ov.InferRequest] = deque()
        position = {name: index for index, name in enumerate(leaves.inputs)}
        computed = iter(range(len(leaves.computed)))
        self._returned = [
            ~position[leaves.passed_through[name]] if name in leaves.passed_through else next(computed)
            for name in leaves.outputs
        ]
        self._in_place = {position[name]: len(leaves.computed) + i for i, name in enumerate(leaves.in_place)}
        self._types = [output.get_element_type() for output in self.compiled.outputs]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the graph once (see `polyport.pipeline.Runner`)."""
        try:
            request = self._free.pop()
        except IndexError:
            request = self.compiled.create_infer_request()
        for index, tensor in enumerate(inputs):
            request.set_input_tensor(index, to_openvino(tensor))
        made = []
        for index, kind in enumerate(self._types):
            tensor = ov.Tensor(kind, ov.Shape([0] * len(self.compiled.outputs[index].partial_shape)))
            made.append(tensor)
            request.set_output_tensor(index, tensor)
        request.infer()
        results = [to_torch(request.get_output_tensor(i)) for i in range(len(made))]
        for index, output in self._in_place.items():
            inputs[index].copy_(results[output])
        self._free.append(request)
        return [results[i] if i >= 0 else inputs[~i] for i in self._returned]


def to_openvino(tensor: torch.Tensor) -> ov.Tensor:
    """A tensor on the same memory."""
    if tensor.dtype == torch.bfloat16:
        return ov.Tensor(tensor.view(torch.int16).numpy(), ov.Shape(list(tensor.shape)), ov.Type.bf16)
    return ov.Tensor(tensor.numpy(), shared_memory=True)


def to_torch(tensor: ov.Tensor) -> torch.Tensor:
    """A tensor on the same memory."""
    if tensor.get_element_type() == ov.Type.bf16:
        return torch.from_numpy(tensor.data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(tensor.data)
