"""Everything this distribution takes from private modules of torch and onnxscript, in one place.

`torch.onnx` has no public way to translate one operator, and its public entry point decomposes the whole program
first, which is what takes most of its time. So the translation functions ("torchlib") are called directly. A new torch
version that moves them needs a change here and nowhere else. Tested with torch 2.13 and onnxscript 0.7.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import onnxscript
import torch
from onnxscript.function_libs.torch_lib import ops as _torchlib_ops
from onnxscript.function_libs.torch_lib import registration as _torchlib_registration
from torch.onnx._internal.exporter import _building, _core, _tensors
from torch.onnx._internal.exporter._torchlib import _torchlib_registry

__all__ = [
    "MAX_OPSET",
    "MIN_OPSET",
    "Torchlib",
    "new_value",
    "onnx_dtype",
    "record",
]

del _torchlib_ops  # Imported for its side effect: it fills the registry.

#: torchlib is written against opset 18; 23 is the newest opset it has own translations for.
MIN_OPSET, MAX_OPSET = 18, 23

onnx_dtype = _core.torch_dtype_to_onnx_dtype


class Torchlib:
    """The ONNX translations that torch and onnxscript ship, looked up one operator at a time.

    torch's own registry infers the signature of all of its 900 functions when it is built, about half a second; a
    model uses some twenty of them, and the recorder infers a missing signature when the function is called.
    """

    def __init__(self, opset_version: int) -> None:
        self._opset_version = opset_version
        self._own: dict[tuple[Any, bool], tuple[int, Callable[..., Any]]] = {}
        for meta in _torchlib_registry.get_torchlib_ops():
            key = (_registry_key(meta.fx_target), meta.is_complex)
            introduced = meta.opset_introduced
            if introduced <= opset_version and introduced > self._own.get(key, (0, None))[0]:
                self._own[key] = (introduced, meta.onnx_function)

    def find(self, target: Any, *, is_complex: bool = False) -> Callable[..., Any] | None:
        """The translation of `target`, or None.

        Args:
            target: what an FX `call_function` node calls.
            is_complex: whether one of its inputs is a complex tensor.
        """
        key = _registry_key(target)
        own = self._own.get((key, is_complex))
        if own is not None:
            return own[1]
        if not isinstance(key, str):
            module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
            key = f"{module}::{name}" if module in ("_operator", "math") else ""
        registry = _torchlib_registration.default_registry
        if key not in registry:
            return None
        entry = registry[key]
        found = entry.complex if is_complex else entry.overloads
        return found[0] if found else None


def _registry_key(target: Any) -> Any:
    return target.name() if isinstance(target, torch._ops.OpOverload) else target  # type: ignore[no-untyped-call]


def new_value(opset: onnxscript.values.Opset, name: str | None = None) -> ir.Value:
    """A value that torchlib functions can compute with (it overloads Python's operators)."""
    return _tensors.SymbolicTensor(opset, name=name)


def record(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    opset: onnxscript.values.Opset,
    constants: dict[Any, ir.Value],
) -> tuple[Any, list[ir.Node], dict[Any, ir.Function]]:
    """Call a torchlib function and record the ONNX nodes it makes.

    Args:
        function: from `Torchlib.find`.
        args: ONNX values and Python constants.
        kwargs: the same, by name.
        opset: what the function's own operators belong to.
        constants: filled by and shared between calls: constants that exist already.

    Returns:
        What the function returned, the nodes in order, and the ONNX functions they call.
    """
    recorder = _building.OpRecorder(opset, constants)  # type: ignore[abstract]  # torch never calls `eval_op`
    with onnxscript.evaluator.default_as(recorder):
        # Higher-order operators reach the recorder through this module attribute.
        _core.current_tracer = recorder
        try:
            outputs = function(*args, **kwargs)
        finally:
            _core.current_tracer = None
    functions: dict[Any, ir.Function] = {}
    for identifier, called in recorder.functions.items():
        function_ir = (
            called
            if isinstance(called, ir.Function)
            else ir.serde.deserialize_function(called.to_function_proto())
        )
        if "" in function_ir.opset_imports:
            # They are written for opset 18; what changed since then is mended by `opset.adapt`.
            function_ir.opset_imports[""] = opset.version
        functions[identifier] = function_ir
    return outputs, recorder.nodes, functions
