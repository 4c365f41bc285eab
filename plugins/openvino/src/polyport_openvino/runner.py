"""Running a model with OpenVINO."""

from __future__ import annotations

from collections.abc import Sequence

import openvino as ov
import torch

from polyport.metadata import ExportMetadata
from polyport.pipeline import RunRequest
from polyport_dynamo.lowering import Leaves
from polyport_openvino.compiling import compile_model
from polyport_openvino.ports import in_order
from polyport_openvino.requests import BoundRequest, Output, RequestPool


class ModelRunner:
    """Executes one model, which any number of threads may share.

    Inputs and outputs share their memory with OpenVINO. Inputs that a call changes are copied: bound to one memory as input and
    output, OpenVINO copies them twice (60 tensors of a static cache, 24 MB: 7.5 ms; written elsewhere and copied back 5.4 ms).

    Args:
        model: The model.
        metadata: The record of the model.
        request: Device and options: `config` (properties that the model is compiled with) and `torch_threads` (see
            `polyport_openvino.compiling.compile_model`).

    Raises:
        InputError: The device, an option or a property is not available.
        ExportError: OpenVINO can't compile the model.
        ArtifactError: The model is not the one that the record describes.
    """

    def __init__(self, model: ov.Model, metadata: ExportMetadata, request: RunRequest) -> None:
        self.device = "cpu"
        leaves = Leaves.of(metadata)
        ours = leaves.graph_names()
        self._inputs = in_order(model.inputs, ours[0], leaves.inputs, "takes")
        outputs = in_order(model.outputs, ours[1], (*leaves.computed, *leaves.in_place), "returns")
        self.compiled = compile_model(model, request)
        count, position = len(leaves.computed), {name: index for index, name in enumerate(leaves.inputs)}
        #: Outputs that are an input as it came: OpenVINO leaves their tensors empty where sizes vary.
        unchanged = {
            place: self._inputs.index(source)
            for place, index in enumerate(outputs)
            if (source := _parameter_behind(model, index)) is not None
        }
        made = [place for place in range(count) if place not in unchanged]
        reused = [place for place in range(count, len(outputs)) if place not in unchanged]
        self._outputs = [Output.of(self.compiled, outputs[place]) for place in made]
        self._reused = [outputs[place] for place in reused]
        results = {place: index for index, place in enumerate([*made, *reused])}
        #: Index of a changed input -> which result is its new content, or which input (counted from -1 down).
        self._changed = [
            (position[name], results.get(count + i, ~unchanged.get(count + i, 0)))
            for i, name in enumerate(leaves.in_place)
        ]
        self._cloned, self._returned = [], []
        computed = iter(range(count))
        for index, name in enumerate(leaves.outputs):
            if name in leaves.passed_through:
                self._returned.append(~position[leaves.passed_through[name]])
            elif (place := next(computed)) in results:
                self._returned.append(results[place])
            else:
                self._returned.append(~unchanged[place])
                self._cloned.append(index)
        self._pool = RequestPool(self.make_request)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the graph once (see `polyport.pipeline.Runner`)."""
        request = self._pool.take()
        returned = self.run(request, inputs)
        self._pool.give_back(request)
        return returned

    def run(self, request: BoundRequest, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the graph once in a request of one's own (see `make_request`)."""
        results = request.run(inputs)
        returned = [results[i] if i >= 0 else inputs[~i] for i in self._returned]
        for index in self._cloned:
            returned[index] = returned[index].clone()
        if self._changed:
            with torch.inference_mode():  # which may write to any tensor
                for index, source in self._changed:
                    inputs[index].copy_(results[source] if source >= 0 else inputs[~source])
        return returned

    def make_request(self) -> BoundRequest:
        """A new infer request, bound to nothing yet."""
        return BoundRequest(self.compiled.create_infer_request(), self._inputs, self._outputs, self._reused)


def _parameter_behind(model: ov.Model, output: int) -> int | None:
    """Index of the parameter that a model returns as an output, without doing anything to it."""
    node = model.get_results()[output].input_value(0).get_node()
    return model.get_parameter_index(node) if node.get_type_name() == "Parameter" else None
