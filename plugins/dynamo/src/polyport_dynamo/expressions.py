"""Which texts in an archive are nothing but arithmetic over sizes.

Sizes go through `sympy.sympify`, guards through Python's compiler. Both evaluate, so both are taken apart here first, and every
part must be known.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

_SYMBOL = re.compile(r"[a-z]{1,8}\d{1,6}")
_NUMBER = re.compile(r"-?[\d.]{1,100}(e[+-]?\d{1,5})?")

#: What sympy prints for sizes, and the functions of `torch.utils._sympy.functions`.
_FUNCTIONS = frozenset({
    "Symbol", "Integer", "Float", "Rational", "Pow", "Mul", "Add", "Mod", "Max", "Min", "Abs", "floor",
    "ceiling", "ITE", "Piecewise", "ExprCondPair", "Tuple", "And", "Or", "Not", "Eq", "Ne", "Lt", "Le",
    "Gt", "Ge", "Equality", "Unequality", "StrictLessThan", "LessThan", "StrictGreaterThan", "GreaterThan",
    "FloorDiv", "ModularIndexing", "Where", "PythonMod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv",
    "LShift", "RShift", "PowByNatural", "FloatPow", "FloatTrueDiv", "IntTrueDiv",
    "IsNonOverlappingAndDenseIndicator", "TruncToFloat", "TruncToInt", "RoundToInt", "RoundDecimal",
    "ToFloat", "Identity",
})  # fmt: skip
_CONSTANTS = frozenset({"true", "false", "oo", "int_oo", "nan", "zoo"})

#: What guards call: on inputs, by name, and by path.
_METHODS = frozenset({"size", "stride", "storage_offset", "dim", "numel"})
_BUILTINS = frozenset({"max", "min", "abs", "int", "float", "bool", "len"})
_PATHS = re.compile(
    r"torch\._?sym_[a-z]+|torch\.utils\._sympy\.functions\.[A-Z]\w*"
    r"|math\.(trunc|floor|ceil|sqrt|pow|exp|log2?|a?(cos|sin|tan)h?)"
)

_ARITHMETIC = (
    ast.Expression, ast.Load, ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.boolop,
    ast.cmpop,
)  # fmt: skip


def is_symbol(text: str) -> bool:
    """Whether a text is the name of a size (`s53`, `u0`)."""
    return _SYMBOL.fullmatch(text) is not None


def is_size(text: str) -> bool:
    """Whether a text is arithmetic over sizes, as sympy prints it (`Mul(Integer(32), Symbol('s53', positive=True))`)."""
    return _holds(text, _is_size_part)


def is_guard(text: str) -> bool:
    """Whether a text compares sizes of inputs (`L['input_ids'].size()[1] <= 64`)."""
    return _holds(text, _is_guard_part)


def _holds(text: str, check: Callable[[ast.AST], bool]) -> bool:
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return check(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _is_size_part(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            if name not in _FUNCTIONS or not all(isinstance(word.value, ast.Constant) for word in keywords):
                return False
            if name in ("Symbol", "Float") and args and isinstance(args[0], ast.Constant):
                # the only texts: a name or a number, as anything else sympy might evaluate once more
                kind = _SYMBOL if name == "Symbol" else _NUMBER
                return len(args) == 1 and kind.fullmatch(str(args[0].value)) is not None
            return all(map(_is_size_part, args))
        case ast.Name(id=name):
            return name in _CONSTANTS or is_symbol(name)
        case ast.Constant(value=value):
            return value is None or type(value) in (bool, int, float)
        case ast.Tuple(elts=items):
            return all(map(_is_size_part, items))
    return isinstance(node, _ARITHMETIC) and all(map(_is_size_part, ast.iter_child_nodes(node)))


def _is_guard_part(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=func, args=args, keywords=[]):
            return _is_guard_function(func) and all(map(_is_guard_part, args))
        case ast.Name(id=name):
            return name == "L"
        case ast.Attribute(value=inner, attr=name):
            return not name.startswith("_") and _is_guard_part(inner)
        case ast.Subscript(value=inner, slice=ast.Constant(value=str() | int())):
            return _is_guard_part(inner)
        case ast.Constant(value=value):
            return value is None or type(value) in (bool, int, float)
    return isinstance(node, _ARITHMETIC) and all(map(_is_guard_part, ast.iter_child_nodes(node)))


def _is_guard_function(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name):
            return name in _BUILTINS
        case ast.Attribute(value=inner, attr=name) if name in _METHODS:
            return _is_guard_part(inner)
    return _PATHS.fullmatch(ast.unparse(node)) is not None
