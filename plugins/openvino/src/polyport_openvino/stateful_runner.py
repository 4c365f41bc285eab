"""Running a model whose caches are variables of the runtime."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import openvino as ov
import torch

from polyport.metadata import ExportMetadata, TensorInfo
from polyport.pipeline import RunRequest
from polyport_openvino.runner import ModelRunner
from polyport_openvino.stateful import BEAM_IDX, variables_of
from polyport_openvino.states import States


class StatefulRunner:
    """Executes one model with state, which any number of threads may share.

    A call that brings the caches of an earlier one, as they were returned, goes on in the infer request that has them in its
    variables; caches of any other origin are written into those of a free request. What is returned stands for the variables
    (`polyport.held.HeldTensor`).

    Args:
        model: The model.
        metadata: The record of the model.
        request: Device and options (see `ModelRunner`).

    Raises:
        InputError: The device, an option or a property is not available.
        ExportError: OpenVINO can't compile the model.
        ArtifactError: The model is not the one that the record describes.
    """

    def __init__(self, model: ov.Model, metadata: ExportMetadata, request: RunRequest) -> None:
        names = set(variables_of(metadata))
        outside = attrs.evolve(
            metadata,
            inputs=(
                *(info for info in metadata.inputs if info.name not in names),
                TensorInfo(BEAM_IDX, "int32", ("rows",)),
            ),
            outputs=tuple(info for info in metadata.outputs if info.name not in names),
        )
        self._steps = ModelRunner(model, outside, request)
        self.device = self._steps.device
        self.states = States(metadata, self._steps.make_request)
        self._given = [i for i, info in enumerate(metadata.inputs) if info.name not in names]
        # positions among the variables, or ~ those among what is computed
        computed, held = itertools.count(), {name: i for i, name in enumerate(self.states.names)}
        self._returned = [held[n] if n in held else ~next(computed) for n in metadata.output_names]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the graph once (see `polyport.pipeline.Runner`)."""
        lease, rows = self.states.lease(self, inputs)
        with lease:
            computed = self._steps.run(lease.request, [*(inputs[i] for i in self._given), rows])
            held = self.states.kept(self, lease, inputs)
        return [held[i] if i >= 0 else computed[~i] for i in self._returned]
