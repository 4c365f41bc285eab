"""Running a `torch.export` program with little in between.

`ExportedProgram.module()` flattens, checks and unflattens at every call what core has already checked and flattened, so the
graph itself is called: with the weights, then the inputs. They are the caller's own tensors, and what the graph writes to
them, such as a step to a static cache, the caller finds there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument

from polyport.errors import ArtifactError, InputError
from polyport.metadata import ExportMetadata
from polyport_dynamo.compact import compact
from polyport_dynamo.mapped import move_weights


class ProgramRunner:
    """Executes one program with PyTorch.

    Args:
        program: The program.
        metadata: The record of the program, which it must fit; None where there is none yet.
        device: Where to run; None for where the program's weights are.

    Raises:
        InputError: The device is not available.
        ArtifactError: The program is not the one that the record describes.
    """

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        metadata: ExportMetadata | None = None,
        device: str | None = None,
    ) -> None:
        if device is not None:
            program = _moved(program, device)
        self.device = str(_device(program))
        # a program without a record is tried once, while it is made; one with a record is called by who checks dtypes
        self._forward = program.graph_module.forward if metadata is None else compact(program)
        self._arguments: list[Any] = []
        self._places: list[int] = []
        for spec in program.graph_signature.input_specs:
            if spec.kind != InputKind.USER_INPUT:
                self._arguments.append(_lifted(program, spec))
            elif isinstance(spec.arg, ConstantArgument):
                self._arguments.append(spec.arg.value)
            else:
                self._places.append(len(self._arguments))
                self._arguments.append(None)
        self._outputs = [
            index
            for index, spec in enumerate(program.graph_signature.output_specs)
            if spec.kind == OutputKind.USER_OUTPUT and isinstance(spec.arg, TensorArgument)
        ]
        if metadata is None:
            return
        found, recorded = (
            (len(self._places), len(self._outputs)),
            (len(metadata.inputs), len(metadata.outputs)),
        )
        if found != recorded:
            raise ArtifactError(
                f"The program takes {found[0]} tensors and returns {found[1]}, but the export's metadata describes one "
                f"that takes {recorded[0]} and returns {recorded[1]}.",
                stage="run",
                backend="dynamo",
            )

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the graph once (see `polyport.pipeline.Runner`)."""
        arguments = self._arguments.copy()
        for place, tensor in zip(self._places, inputs, strict=True):
            arguments[place] = tensor
        with torch.no_grad():
            outputs = self._forward(*arguments)
        return [outputs[index] for index in self._outputs]


def _lifted(program: torch.export.ExportedProgram, spec: Any) -> Any:
    """The weight or constant that a graph input stands for."""
    if spec.target in program.state_dict:
        return program.state_dict[spec.target].detach()
    if spec.target in program.constants:
        return program.constants[spec.target]
    raise ArtifactError(f"The program lacks the tensor {spec.target!r}.", stage="run", backend="dynamo")


def _device(program: torch.export.ExportedProgram) -> torch.device:
    for tensor in (*program.state_dict.values(), *program.constants.values()):
        if isinstance(tensor, torch.Tensor):
            return tensor.device
    return torch.device("cpu")


def _moved(program: torch.export.ExportedProgram, device: str) -> torch.export.ExportedProgram:
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"The device {device!r} is not available to PyTorch here: {reason}", stage="run"
        ) from error
    here = _device(program)
    if target.type == here.type and target.index in (None, here.index):
        return program
    from torch.export.passes import move_to_device_pass

    move_weights(program, target)
    return move_to_device_pass(program, str(target))
