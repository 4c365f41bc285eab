"""What a translation works with: the OpenVINO values of FX nodes, sizes, and the makers of OpenVINO nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as opset
import torch

from polyport_dynamo.lowering.facts import symbolic
from polyport_openvino.decoder import element_type

Node = torch.fx.Node

#: Functions in torch's symbolic expressions and the operators that compute them.
_OPERATORS = {"Add": "add", "Mul": "multiply", "Mod": "floor_mod", "PythonMod": "floor_mod", "CleanDiv": "divide",
              "Max": "maximum", "Min": "minimum", "IntTrueDiv": "divide", "FloatTrueDiv": "divide"}  # fmt: skip

#: How functions that turn a float into an integer round.
_ROUNDINGS = {"TruncToInt": None, "FloorToInt": "floor", "CeilToInt": "ceiling", "RoundToInt": "round"}


class Context:
    """The translation of one FX graph.

    A symbolic integer is a scalar of int64, as the frontend makes it; equal expressions share one, wherever in the program they
    are computed.

    Args:
        body: Translates the graph of a loop, which a `get_attr` node stands for, and names its inputs in order.
        inputs: What a caller passes.
        stateful: Whether caches that grow become variables.
    """

    def __init__(
        self,
        body: Callable[[Node], tuple[ov.Model, list[str]]],
        inputs: Iterable[Node],
        stateful: bool = False,
    ) -> None:
        self.body, self.stateful = body, stateful
        self.inputs = frozenset(inputs)
        self.values: dict[Node, Any] = {}
        self._sizes: dict[Any, ov.Output] = {}
        self._sources: dict[Any, tuple[ov.Output, int]] = {}
        self._vectors: dict[Any, ov.Output] = {}
        self._shared: dict[Any, ov.Output] = {}

    # ── values ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def op(self, name: str, *inputs: Any, **attributes: Any) -> ov.Output:
        """The result of a new node of opset 15.

        Args:
            name: Of the opset's function (`"multiply"`).
            inputs: Values, and plain numbers where the function takes them.
            attributes: As the function takes them.
        """
        return getattr(opset, name)(*inputs, **attributes).output(0)

    def value(self, arg: Node) -> ov.Output:
        """The value of a node."""
        found = self.values.get(arg)
        if found is None and isinstance(arg.meta.get("val"), torch.SymInt | int):
            return self.scalar(arg)
        if not isinstance(found, ov.Output):
            raise TypeError(f"{arg.name} is {type(found).__name__}, not one tensor")
        return found

    def constant(self, value: Any, dtype: torch.dtype) -> ov.Output:
        """A number, list or array as a value."""
        kind = element_type(dtype)
        if dtype == torch.bfloat16 or dtype not in _NUMPY:
            return opset.constant(np.asarray(value, np.float32), kind).output(0)
        with np.errstate(
            over="ignore"
        ):  # numbers beyond the range wrap around or become infinite, as in torch
            return opset.constant(np.asarray(value).astype(_NUMPY[dtype])).output(0)

    def ints(self, *values: int) -> ov.Output:
        """A vector of int64."""
        return self.constant(values, torch.int64)

    def tensor(self, arg: Any, dtype: torch.dtype | None = None) -> ov.Output:
        """A node, size or number as a value.

        Args:
            arg: What an FX node takes.
            dtype: What it is converted to; by default it stays what it is.
        """
        if isinstance(arg, Node):
            fake = arg.meta.get("val")
            value = self.value(arg)
            if isinstance(fake, torch.Tensor) and fake.dtype == dtype:
                dtype = None if value.get_element_type() == element_type(fake.dtype) else dtype
            return value if dtype is None else self.cast(value, dtype)
        if isinstance(arg, torch.SymInt):
            return self.cast(self.scalar(arg), dtype or torch.int64)
        if isinstance(arg, ov.Output):
            return arg if dtype is None else self.cast(arg, dtype)
        natural = {bool: torch.bool, int: torch.int64}.get(type(arg), torch.float32)
        return self.constant(arg, dtype or natural)

    def cast(self, value: ov.Output, dtype: torch.dtype) -> ov.Output:
        """`value` as `dtype`; itself where it is that already."""
        kind = element_type(dtype)
        if value.get_element_type() == kind:
            return value
        if dtype == torch.bool:  # 0.5 is true; converted as a number, it would be cut to 0
            return self.op("not_equal", value, self.op("convert_like", self.constant(0, torch.int32), value))
        return self.op("convert", value, kind.get_type_name())

    def once(self, key: Any, make: Any) -> ov.Output:
        """What `make` returns, made once for all who ask for the same.

        Args:
            key: Hashable; names the use and all that the value depends on.
            make: Called without arguments.
        """
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    # ── sizes ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def learn_sizes(self, value: ov.Output, fake: torch.Tensor) -> None:
        """Remember from which axes of a value symbols can be read that are not known yet."""
        for axis, dim in enumerate(fake.shape):
            expression = symbolic(dim)
            if expression is not None and not isinstance(expression, int) and expression.is_Symbol:
                self._sources.setdefault(expression, (value, axis))

    def scalar(self, arg: Any) -> ov.Output:
        """An int, symbolic integer or node of one as a scalar of int64."""
        expression = symbolic(arg.meta.get("val") if isinstance(arg, Node) else arg)
        found = self.expression(expression)
        if found is not None:
            return found
        held = self.values.get(arg) if isinstance(arg, Node) else None
        if not isinstance(held, ov.Output):
            raise ValueError(f"the size {arg} ({expression}) can't be computed from the inputs")
        return self.remember(expression, held)

    def remember(self, expression: Any, scalar: ov.Output) -> ov.Output:
        """Let later uses of an equal expression find this value."""
        made = self.cast(scalar, torch.int64)
        if expression is not None and not isinstance(expression, int):
            self._sizes.setdefault(expression, made)
        return made

    def expression(self, expression: Any) -> ov.Output | None:
        """The value of a size given as an int or sympy expression; None where nothing computes it."""
        if expression is None:
            return None
        if isinstance(expression, int) or expression.is_Integer:
            return self.constant(int(expression), torch.int64)
        if expression.is_number:
            return self.constant(float(expression), torch.float32)
        found = self._sizes.get(expression)
        if found is None and expression in self._sources:
            found = self._sizes[expression] = self.axis_size(*self._sources[expression])
        if found is None and not expression.is_Symbol:
            parts = [self.expression(part) for part in expression.args]
            known = [part for part in parts if part is not None]
            found = self._computed(expression, known) if len(known) == len(parts) else None
            if found is not None:
                self._sizes[expression] = found
        return found

    def _computed(self, expression: Any, parts: list[ov.Output]) -> ov.Output | None:
        """An expression of values that are there; None where it has no translation."""
        name = expression.func.__name__
        if name in _ROUNDINGS:
            rounding = _ROUNDINGS[name]
            return self.cast(parts[0] if rounding is None else self.op(rounding, parts[0]), torch.int64)
        if name == "ToFloat":
            return self.cast(parts[0], torch.float32)
        if name in ("Pow", "PowByNatural", "FloatPow"):
            return self.power(parts[0], float(expression.args[1])) if expression.args[1].is_number else None
        if name in ("FloorDiv", "ModularIndexing"):
            quotient = floor_divide(self, parts[0], parts[1])
            return quotient if name == "FloorDiv" else self.op("floor_mod", quotient, parts[2])
        if name not in _OPERATORS:
            return None
        whole = all(part.get_element_type() == ov.Type.i64 for part in parts) and not name.endswith("TrueDiv")
        total, *others = parts if whole else [self.cast(part, torch.float32) for part in parts]
        for part in others:
            total = self.op(_OPERATORS[name], total, part)
        return total

    def power(self, value: ov.Output, exponent: float) -> ov.Output | None:
        """A power of a size. `Power` of OpenVINO's CPU is not exact: 36 ** 0.5 may be less than 6."""
        if exponent == 0.5:
            return self.op("sqrt", self.cast(value, torch.float32))
        if exponent not in range(1, 9):
            return None
        total = value
        for _ in range(int(exponent) - 1):
            total = self.op("multiply", total, value)
        return total

    def axis_size(self, value: ov.Output, axis: int) -> ov.Output:
        """The length of one axis of a value, as a scalar."""
        place = value.get_node().get_name(), value.get_index()
        shape = self.once(("shape", *place), lambda: self.op("shape_of", value, output_type="i64"))
        zero = self.constant(0, torch.int64)
        return self.once(("axis", axis, *place),
                         lambda: self.op("gather", shape, self.constant(axis, torch.int64), zero))  # fmt: skip

    def sizes(self, args: Sequence[Any]) -> ov.Output:
        """Several sizes as one vector of int64; equal ones are made once.

        Args:
            args: Ints, symbolic integers, and nodes of them.
        """
        known = [symbolic(arg.meta.get("val") if isinstance(arg, Node) else arg) for arg in args]
        if all(isinstance(size, int) for size in known):
            return self.ints(*known)
        key = tuple(arg if size is None else size for arg, size in zip(args, known, strict=True))
        if key not in self._vectors:
            parts: list[ov.Output] = []
            run: list[int] = []
            for arg, size in zip(args, known, strict=True):
                if isinstance(size, int):
                    run.append(size)
                    continue
                if run:
                    parts.append(self.ints(*run))
                    run = []
                parts.append(self.op("unsqueeze", self.scalar(arg), self.constant(0, torch.int64)))
            if run:
                parts.append(self.ints(*run))
            self._vectors[key] = parts[0] if len(parts) == 1 else self.op("concat", parts, 0)
        return self._vectors[key]


_NUMPY = {
    torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16, torch.int64: np.int64,
    torch.int32: np.int32, torch.int16: np.int16, torch.int8: np.int8, torch.uint8: np.uint8, torch.bool: np.bool_,
}  # fmt: skip


def floor_divide(c: Context, left: ov.Output, right: ov.Output) -> ov.Output:
    """Division of integers that rounds down, as Python's does; `Divide` of OpenVINO's CPU truncates."""
    return c.op("divide", c.op("subtract", left, c.op("floor_mod", left, right)), right)
