"""Sizes that follow from the sizes of the inputs, as expressions in the names of axes (`"past+sequence"`)."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from polyport.errors import ArtifactError

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Max": max,
    "Min": min,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
}


def compiled(expression: Any) -> Callable[[Mapping[str, int]], int]:
    """A function from the sizes of the named axes to the size that an expression stands for.

    Args:
        expression: Names of axes, whole numbers, `+ - * // %`, and `Max`, `Min`, `FloorDiv`, `Mod`. It may come from a file:
            it is parsed, and nothing else is evaluated.

    Raises:
        ArtifactError: It is anything else.
    """
    try:
        tree = ast.parse(str(expression), mode="eval").body
        _check(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ArtifactError(
            f"The export records a size {expression!r}, which is no size.", stage="load"
        ) from error
    return lambda sizes: _evaluate(tree, sizes)


def _check(node: ast.expr) -> None:
    match node:
        case ast.Name() | ast.Constant(value=int()):
            return
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            _check(left)
            _check(right)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS and args:
            for arg in args:
                _check(arg)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check(operand)
        case _:
            raise ValueError(ast.dump(node))


def _evaluate(node: ast.expr, sizes: Mapping[str, int]) -> int:
    match node:
        case ast.Name(id=name):
            return sizes[name]
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=op, right=right):
            return int(_OPERATORS[type(op)](_evaluate(left, sizes), _evaluate(right, sizes)))
        case ast.Call(func=ast.Name(id=name), args=args):
            return int(_FUNCTIONS[name](*(_evaluate(arg, sizes) for arg in args)))
        case ast.UnaryOp(operand=operand):
            return -_evaluate(operand, sizes)
        case _:
            raise AssertionError(ast.dump(node))  # `_check` let it through
