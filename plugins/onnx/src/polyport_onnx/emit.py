"""Appends ONNX nodes to a list: the one place where nodes, constants and casts are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxscript

from polyport_onnx import torch_internals

#: Operators whose result is not a function of their inputs alone.
_IMPURE = frozenset({"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli",
                     "Multinomial", "Dropout"})  # fmt: skip


class Emitter:
    """Collects the nodes of one ONNX graph.

    A node equal to one that exists already is not made again, so repeated shape arithmetic and masks appear once and no
    later pass has to look for them.

    Args:
        opset_version: of the default domain.
        inline_constants: make `Constant` nodes instead of initializers (functions have no initializers).
    """

    def __init__(self, opset_version: int, *, inline_constants: bool = False) -> None:
        self.opset_version = opset_version
        self.opset = onnxscript.values.Opset("", opset_version)
        self.nodes: list[ir.Node] = []
        self.initializers: list[ir.Value] = []
        self.functions: dict[Any, ir.Function] = {}
        self.torchlib_constants: dict[Any, ir.Value] = {}
        self.scope = ""
        self._inline_constants = inline_constants
        self._known: dict[Any, tuple[ir.Value, ...]] = {}
        self._constants: dict[Any, ir.Value] = {}

    def op(
        self, op_type: str, *inputs: ir.Value | None, dtype: ir.DataType | None = None, **attributes: Any
    ) -> ir.Value:
        """Append a node with one output.

        Args:
            op_type: in the default domain.
            inputs: None for an optional input that is left out.
            dtype: of the output; by default that of the first input.
            attributes: those that are None are left out.

        Returns:
            The output, of a new node or of an equal one that exists already.
        """
        (value,) = self.ops(op_type, *inputs, outputs=1, **attributes)
        if value.dtype is None:
            known = dtype if dtype is not None else next((i.dtype for i in inputs if i is not None), None)
            if known is not None:
                value.dtype = known
        return value

    def ops(
        self, op_type: str, *inputs: ir.Value | None, outputs: int, **attributes: Any
    ) -> tuple[ir.Value, ...]:
        """Append a node with several outputs; see `op`."""
        given = {name: value for name, value in attributes.items() if value is not None}
        key = (
            op_type,
            tuple(map(id, inputs)),
            tuple((k, _hashable(v)) for k, v in sorted(given.items())),
            outputs,
        )
        found = self._known.get(key)
        if found is not None and op_type not in _IMPURE:
            return found
        made = tuple(torch_internals.new_value(self.opset) for _ in range(outputs))
        attrs = ir.convenience.convert_attributes(given)
        node = ir.Node("", op_type, inputs, attrs, outputs=made, version=self.opset_version)
        self.append(node)
        self._known[key] = made
        return made

    def append(self, node: ir.Node) -> None:
        """Append a finished node, named after the part of the model that it comes from."""
        node.name = (
            f"{self.scope}/{node.op_type}_{len(self.nodes)}"
            if self.scope
            else f"{node.op_type}_{len(self.nodes)}"
        )
        self.nodes.append(node)

    def constant(self, value: Any, dtype: ir.DataType) -> ir.Value:
        """A scalar, list or array as a value; equal small constants are shared."""
        array = np.asarray(value, dtype=dtype.numpy())
        key = (array.shape, dtype, array.tobytes()) if array.size <= 64 else None
        if key is not None and key in self._constants:
            return self._constants[key]
        made = torch_internals.new_value(self.opset)
        tensor = ir.Tensor(array, dtype=dtype)
        made.shape, made.dtype = ir.Shape(array.shape), dtype
        if self._inline_constants:
            node = ir.Node(
                "",
                "Constant",
                [],
                [ir.AttrTensor("value", tensor)],
                outputs=[made],
                version=self.opset_version,
            )
            self.append(node)
        else:
            made.name = f"constant_{len(self.initializers)}"
            tensor.name = made.name
            self.initializers.append(made)
        made.const_value = tensor
        if key is not None:
            self._constants[key] = made
        return made

    def ints(self, *values: int) -> ir.Value:
        """A vector of int64."""
        return self.constant(values, ir.DataType.INT64)

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """`value` as `dtype`; itself where it is that already."""
        if value.dtype == dtype:
            return value
        made = self.op("Cast", value, dtype=dtype, to=int(dtype))
        if made.shape is None and value.shape is not None:
            made.shape = value.shape.copy()
        return made

    def squeeze(self, vector: ir.Value) -> ir.Value:
        """The scalar in a vector of one element."""
        scalar = self.op("Squeeze", vector, self.ints(0))
        scalar.shape = ir.Shape(())
        return scalar

    def concat(self, parts: Sequence[ir.Value], axis: int = 0) -> ir.Value:
        """Concatenate; a single part is returned as it is."""
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=axis)


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(value)
    return value if isinstance(value, (int, float, str, bool)) else id(value)
