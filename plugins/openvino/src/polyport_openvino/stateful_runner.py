"""temporary"""

from __future__ import annotations

from collections.abc import Sequence

import openvino as ov
import torch

from polyport.metadata import ExportMetadata
from polyport.pipeline import RunRequest
from polyport_dynamo.lowering import Leaves
from polyport_openvino.devices import core
from polyport_openvino.runner import to_openvino, to_torch
from polyport_openvino.states import States


class StatefulRunner:
    def __init__(self, model: ov.Model, metadata: ExportMetadata, request: RunRequest) -> None:
        options = request.take(config=None, torch_threads=None)
        self.device = "cpu"
        config = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", **(options["config"] or {})}
        self.compiled = core().compile_model(model, "CPU", config)
        self.states = States(metadata, self.compiled.create_infer_request)
        self.leaves = Leaves.of(metadata)
        self.names = metadata.output_names
        self.rest = [i for i in range(len(metadata.inputs)) if i not in set(self.states.places)]
        self.types = [output.get_element_type() for output in self.compiled.outputs]
        self.out = [n for n in self.leaves.computed if n not in set(self.states.names)]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        lease, rows = self.states.lease(self, inputs)
        try:
            request = lease.request
            for index, place in enumerate(self.rest):
                request.set_input_tensor(index, to_openvino(inputs[place]))
            request.set_input_tensor(len(self.rest), to_openvino(rows))
            made = []
            for index, kind in enumerate(self.types):
                tensor = ov.Tensor(kind, ov.Shape([0] * len(self.compiled.outputs[index].partial_shape)))
                made.append(tensor)
                request.set_output_tensor(index, tensor)
            lease.step += 1
            request.infer()
            results = dict(zip(self.out, [to_torch(request.get_output_tensor(i)) for i in range(len(made))], strict=False))
            results |= self.states.kept(self, lease, inputs)
        finally:
            lease.lock.release()
        return [
            inputs[self.leaves.inputs.index(self.leaves.passed_through[n])] if n in self.leaves.passed_through else results[n]
            for n in self.names
        ]
