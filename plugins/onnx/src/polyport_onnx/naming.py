"""Readable names: of axes instead of torch's symbols, and of values, unique in the graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import onnx_ir as ir
import sympy
import torch

from polyport_dynamo.lowering.facts import symbolic


class AxisNames:
    """Names of dimensions, from the names the caller gave to the axes of the inputs."""

    def __init__(self) -> None:
        self._names: dict[Any, sympy.Symbol] = {}
        self._text: dict[Any, str] = {}
        self._unknown = 0

    def learn(self, leaf: str, fake: torch.Tensor, axes: Mapping[int, str]) -> None:
        """Take over the names of the axes of one input.

        Args:
            leaf: name of the input, for axes that have no name.
            fake: what the program was traced with.
            axes: dimension to name. Dimensions that the program fixed are ignored.
        """
        for index, dim in enumerate(fake.shape):
            expression = symbolic(dim)
            if not isinstance(expression, sympy.Symbol):
                continue
            name = axes.get(index)
            if expression not in self._names and name is not None:
                self._names[expression] = sympy.Symbol(name, integer=True, positive=True)
        del leaf

    def learn_unnamed(self, leaf: str, fake: torch.Tensor) -> None:
        """Name the axes that have none yet after the input. Call it when all of the inputs have been learned."""
        for index, dim in enumerate(fake.shape):
            expression = symbolic(dim)
            if isinstance(expression, sympy.Symbol) and expression not in self._names:
                self._names[expression] = sympy.Symbol(f"{leaf}_axis_{index}", integer=True, positive=True)

    def dim(self, dim: int | torch.SymInt) -> int | str:
        """A dimension as ONNX wants it: a number, or a name or expression of names."""
        expression = symbolic(dim)
        if isinstance(expression, int):
            return expression
        text = self._text.get(expression)
        if text is None:
            for symbol in sorted(expression.free_symbols, key=str):
                if symbol not in self._names:
                    # A size that depends on values (the number of non-zero elements, say) is no axis of an input.
                    self._names[symbol] = sympy.Symbol(f"unknown_{self._unknown}", integer=True)
                    self._unknown += 1
            text = self._text[expression] = str(expression.xreplace(self._names))
        return text

    def shape(self, fake: torch.Tensor) -> ir.Shape:
        """The shape of a traced tensor; complex numbers are pairs of real ones in ONNX."""
        dims = [self.dim(dim) for dim in fake.shape]
        return ir.Shape([*dims, 2] if fake.dtype.is_complex else dims)


def make_unique(graph: ir.Graph, reserved: Iterable[str]) -> None:
    """Name every value of the graph, avoiding the names that its interface has taken.

    Args:
        graph: with its inputs, outputs and initializers named already.
        reserved: those names.
    """
    taken = set(reserved)
    fixed = {id(value) for value in (*graph.inputs, *graph.outputs, *graph.initializers.values())}
    for node in ir.traversal.RecursiveGraphIterator(graph):
        for index, value in enumerate(node.outputs):
            if id(value) in fixed:
                continue
            wanted = value.name or f"{node.name or node.op_type}_{index}"
            name, count = wanted, 0
            while name in taken:
                count += 1
                name = f"{wanted}_{count}"
            taken.add(name)
            value.name = name
