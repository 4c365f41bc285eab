"""What a translation function works with: the ONNX values of FX nodes, sizes, and the node emitter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import sympy
import torch

from polyport_dynamo.lowering.facts import symbolic
from polyport_onnx import torch_internals
from polyport_onnx.emit import Emitter
from polyport_onnx.naming import AxisNames

_SCALARS = {bool: ir.DataType.BOOL, int: ir.DataType.INT64, float: ir.DataType.FLOAT}

#: Functions in torch's symbolic expressions and the ONNX operators that compute them.
_OPERATORS = {"Add": "Add", "Mul": "Mul", "Mod": "Mod", "PythonMod": "Mod", "FloorDiv": "Div", "CleanDiv": "Div",
              "Max": "Max", "Min": "Min"}  # fmt: skip


class Context:
    """The translation of one FX graph.

    Symbolic integers are kept as vectors of one element, the form in which shapes are put together; equal symbolic
    expressions share one value, wherever in the program they are computed.

    Args:
        emit: takes the nodes.
        names: of dimensions.
    """

    def __init__(self, emit: Emitter, names: AxisNames) -> None:
        self.emit = emit
        self.names = names
        self.values: dict[torch.fx.Node, Any] = {}
        self.user_inputs: set[torch.fx.Node] = set()
        self._sizes: dict[Any, ir.Value] = {}
        self._sources: dict[Any, tuple[ir.Value, int]] = {}

    # -- tensors -----------------------------------------------------------------------------------------------

    def value(self, arg: torch.fx.Node) -> ir.Value:
        """The ONNX value of a node; symbolic integers as scalars."""
        found = self.values.get(arg)
        if found is None and isinstance(arg.meta.get("val"), torch.SymInt | int):
            found = self.values[arg] = self.emit.squeeze(self.size(arg))
        if not isinstance(found, ir.Value):
            raise TypeError(f"{arg.name} is {type(found).__name__} in ONNX, not one tensor")
        return found

    def tensor(self, arg: Any, dtype: torch.dtype | None = None) -> ir.Value:
        """A node or a Python number as a tensor of the given type (by default its own)."""
        wanted = None if dtype is None else torch_internals.onnx_dtype(dtype)
        if isinstance(arg, torch.fx.Node):
            value = self.value(arg)
            return value if wanted is None else self.emit.cast(value, wanted)
        return self.emit.constant(arg, wanted if wanted is not None else _SCALARS[type(arg)])

    def set_type(self, value: ir.Value, fake: Any) -> None:
        """Give a value the shape and type that the tracer recorded."""
        if isinstance(fake, torch.Tensor):
            value.shape = self.names.shape(fake)
            dtype = fake.dtype.to_real() if fake.dtype.is_complex else fake.dtype
            value.dtype = torch_internals.onnx_dtype(dtype)
        elif isinstance(fake, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
            kind = bool if isinstance(fake, (bool, torch.SymBool)) else int
            value.dtype = _SCALARS[float if isinstance(fake, (float, torch.SymFloat)) else kind]
            value.shape = ir.Shape(())

    # -- sizes -------------------------------------------------------------------------------------------------

    def learn_sizes(self, value: ir.Value, fake: torch.Tensor) -> None:
        """Remember from which axes of an input the symbols can be read."""
        for axis, dim in enumerate(fake.shape):
            expression = symbolic(dim)
            if isinstance(expression, sympy.Symbol):
                self._sources.setdefault(expression, (value, axis))

    def size(self, arg: Any) -> ir.Value:
        """An int, symbolic integer or node of one as a vector of one int64."""
        expression = symbolic(arg.meta.get("val") if isinstance(arg, torch.fx.Node) else arg)
        known = self.expression(expression)
        if known is not None:
            return known
        if isinstance(arg, torch.fx.Node) and isinstance(self.values.get(arg), ir.Value):
            scalar = self.emit.cast(self.values[arg], ir.DataType.INT64)
            return self.remember(expression, self.emit.op("Reshape", scalar, self.emit.ints(1)))
        raise ValueError(f"the size {arg} ({expression}) cannot be computed from the inputs")

    def expression(self, expression: Any) -> ir.Value | None:
        """The value of a size given as an int or sympy expression, or None where nothing computes it."""
        if isinstance(expression, int):
            return self.emit.ints(expression)
        if expression is None:
            return None
        if expression.is_Integer:
            return self.emit.ints(int(expression))
        found = self._sizes.get(expression)
        if found is None and expression in self._sources:
            value, axis = self._sources[expression]
            found = self.axis_size(value, axis)
            self._sizes[expression] = found
        if found is None and expression.func.__name__ in _OPERATORS:
            found = self._computed(expression)
        return found

    def _computed(self, expression: Any) -> ir.Value | None:
        """An expression of sizes, computed from its parts."""
        parts = [self.expression(part) for part in expression.args]
        if any(part is None for part in parts):
            return None
        total, *others = (part for part in parts if part is not None)
        for part in others:
            if expression.func.__name__ == "FloorDiv":
                # Python rounds down and ONNX towards zero; without the remainder there is nothing to round.
                total = self.emit.op("Sub", total, self.emit.op("Mod", total, part))
            total = self.emit.op(_OPERATORS[expression.func.__name__], total, part)
        return self.remember(expression, total)

    def axis_size(self, value: ir.Value, axis: int) -> ir.Value:
        """The length of one axis of a value, as a vector of one element."""
        made = self.emit.op("Shape", value, dtype=ir.DataType.INT64, start=axis, end=axis + 1)
        made.shape = ir.Shape((1,))
        return made

    def remember(self, expression: Any, vector: ir.Value) -> ir.Value:
        """Let later uses of an equal expression find this vector."""
        vector.shape, vector.dtype = ir.Shape((1,)), ir.DataType.INT64
        if expression is not None and not isinstance(expression, int):
            self._sizes.setdefault(expression, vector)
        return vector

    def sizes(self, args: Sequence[Any]) -> ir.Value:
        """Several sizes as one vector."""
        parts: list[ir.Value] = []
        run: list[int] = []
        for arg in args:
            known = symbolic(arg.meta.get("val") if isinstance(arg, torch.fx.Node) else arg)
            if isinstance(known, int):
                run.append(known)
                continue
            if run:
                parts.append(self.emit.ints(*run))
                run = []
            parts.append(self.size(arg))
        if run or not parts:
            parts.append(self.emit.ints(*run))
        return self.emit.concat(parts)
