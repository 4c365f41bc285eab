"""Functions traced, lowered to OpenVINO and run, next to what torch makes of the same arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino as ov
import torch
from torch import Tensor, nn

from polyport_openvino.lowering import lower_program

AUTO = torch.export.Dim.AUTO


class Function(nn.Module):
    """A module around a function, which is what torch.export takes."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> object:
        return self.function(*args)


def trace(function: Callable[..., object], *args: Tensor, dynamic: Sequence[int] = (0,)) -> Any:
    """Export with the same open axes in every argument; a module is exported as it is."""
    module = function if isinstance(function, nn.Module) else Function(function)
    axes = tuple({axis: AUTO for axis in dynamic if axis < arg.dim()} for arg in args)
    with torch.no_grad():
        return torch.export.export(module.eval(), args, strict=False,
                                   dynamic_shapes=(axes,) if isinstance(module, Function) else axes)  # fmt: skip


def leaves(made: object) -> list[Tensor]:
    """The tensors of a result."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(made) if isinstance(leaf, Tensor)]


def model_of(program: Any, inputs: int, outputs: int) -> ov.Model:
    """A traced program as a model."""
    names = [f"in_{index}" for index in range(inputs)], [f"out_{index}" for index in range(outputs)]
    return lower_program(program, input_names=names[0], output_names=names[1]).model


@functools.cache
def _core() -> ov.Core:
    return ov.Core()


def run(model: ov.Model, args: Sequence[Tensor]) -> list[Tensor]:
    """Run a model on the CPU with float32 as it is."""
    request = _core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    for index, arg in enumerate(args):
        if arg.dtype == torch.bfloat16:
            bits = arg.contiguous().view(torch.int16).numpy()
            request.set_input_tensor(index, ov.Tensor(bits, ov.Shape(list(arg.shape)), ov.Type.bf16))
        else:
            request.set_input_tensor(index, ov.Tensor(arg.contiguous().numpy()))
    request.infer()
    made = []
    for index in range(len(model.outputs)):
        tensor = request.get_output_tensor(index)
        if tensor.get_element_type() == ov.Type.bf16:
            made.append(torch.from_numpy(tensor.data.view(np.int16).copy()).view(torch.bfloat16))
        else:
            made.append(torch.from_numpy(tensor.data.copy()))
    return made


def check(
    function: Callable[..., object],
    args: Sequence[Tensor],
    others: Sequence[Sequence[Tensor]] = (),
    *,
    dynamic: Sequence[int] = (0,),
    atol: float,
    rtol: float,
) -> ov.Model:
    """Compare with torch: shapes, types and values.

    Args:
        function: What is traced.
        args: What it is traced with.
        others: Further arguments it must be right for.
        dynamic: The axes that are left open.
        atol: As `torch.testing.assert_close` takes it.
        rtol: The same.

    Returns:
        The model.
    """
    expected = [leaves(function(*given)) for given in (args, *others)]
    program = trace(function, *args, dynamic=dynamic)
    model = model_of(program, len(args), len(expected[0]))
    for given, wanted in zip((args, *others), expected, strict=True):
        found = run(model, given)
        assert len(found) == len(wanted)
        for left, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(left, right, atol=atol, rtol=rtol, equal_nan=True)
    return model
