"""What a `.pt2` archive may hold to be loaded without trust.

Three things in an archive can run code when torch reads or runs it: pickles (sample inputs, pickled tensors, custom
objects), expressions that sympy and Python evaluate (symbolic sizes, guards), and operator names, which torch looks up
by attribute starting at the `torch` module, where `os` can be reached. So none of the first is allowed, the second must
parse to arithmetic, and the third must be operators.

Source: `torch/export/pt2_archive/_package.py` and `torch/_export/serde/serialize.py` of torch 2.13.
"""

from __future__ import annotations

import ast
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyport.errors import ArtifactError

#: JSON above this size is no model's graph.
_MAX_JSON_BYTES = 1 << 30

#: Operators: registered ones, and the arithmetic on sizes that export emits.
_TARGET = re.compile(
    r"torch\.ops(\.\w+){2,3}"
    r"|torch\.sym_\w+|torch\._sym_\w+"
    r"|(_operator|operator|math)\.\w+"
    r"|torch\.(autocast|amp\.autocast_mode\.\w+|_C\._set_grad_enabled)"
    r"|#\w+(:\w+)*"
)

_NODES = (
    ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Call, ast.keyword, ast.Attribute, ast.Subscript, ast.Tuple,
    ast.List, ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.IfExp,
)  # fmt: skip

#: Attributes that guards read: sizes and the functions of `math`.
_ATTRIBUTES = {
    "size", "stride", "storage_offset", "dim", "shape", "ndim", "trunc", "floor", "ceil", "sqrt", "pow", "log", "log2",
    "exp", "cos", "sin", "tan", "cosh", "sinh", "tanh", "acos", "asin", "atan", "functions", "utils", "_sympy",
    "sym_float", "sym_int", "sym_max", "sym_min", "sym_ite", "sym_not", "sym_sum",
}  # fmt: skip

_SYMBOL = re.compile(r"[A-Za-z_]\w{0,199}")

#: Text inside an expression: names and numbers. Anything longer could be evaluated a second time by sympy.
_TEXT = re.compile(r"[A-Za-z_]\w{0,199}|-?[\d.]+(e[+-]?\d+)?")


def check_archive(path: Path) -> None:
    """Check that torch can read an archive without running what it holds.

    Raises:
        ArtifactError: It is damaged, or holds something that needs `trust_remote_code=True`.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename: entry.file_size for entry in archive.infolist()}
            for name, size in entries.items():
                _check_entry(path, name, size)
            for name in entries:
                if name.endswith(".json") and "/extra/" not in name:
                    if entries[name] > _MAX_JSON_BYTES:
                        raise ArtifactError(f"{path} holds a description larger than any model's.", stage="load")
                    _check_document(path, name, json.loads(archive.read(name)))
    except ArtifactError:
        raise
    except (zipfile.BadZipFile, OSError, ValueError, RecursionError, KeyError, EOFError) as error:
        raise ArtifactError(f"{path} is damaged: {error}.", stage="load", backend="dynamo") from error


def _check_entry(path: Path, name: str, size: int) -> None:
    inner = name.partition("/")[2]
    if inner.startswith("data/sample_inputs/"):
        if size:
            raise _untrusted(path, "pickled sample inputs")
    elif inner.endswith((".pt", ".pkl", ".so", ".o", ".py", ".cubin")) or "custom_obj" in inner or "aotinductor" in inner:
        raise _untrusted(path, f"the entry {inner!r}")
    elif not (
        inner.startswith(("data/weights/", "data/constants/", "models/", "extra/", ".data/"))
        or inner in {"archive_format", "archive_version", "byteorder", "version", ".format_version"}
        or inner.startswith(".storage_alignment")
    ):
        raise _untrusted(path, f"the entry {inner!r}")


def _check_document(path: Path, name: str, document: Any) -> None:
    for key, value in _pairs(document):
        if key == "use_pickle" and value:
            raise _untrusted(path, "pickled tensors")
        if key == "target" and isinstance(value, str) and not _TARGET.fullmatch(value) and "/models/" in name:
            # signature entries have a `target` too: the name of a parameter, which has no effect beyond a look-up
            if value.startswith(("torch.", "#", "builtins")) or "__" in value:
                raise _untrusted(path, f"a call of {value!r}")
        if key == "expr_str" or (key == "range_constraints" and isinstance(value, dict)) or key == "guards_code":
            for text in [value] if isinstance(value, str) else value or ():
                if not _is_arithmetic(text):
                    raise _untrusted(path, f"the expression {str(text)[:80]!r}")


def _pairs(document: Any) -> Iterator[tuple[str, Any]]:
    """Every key with its value, at any depth."""
    stack = [document]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            yield from value.items()
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)


def _is_arithmetic(text: Any) -> bool:
    """Whether an expression only compares and computes with sizes."""
    if not isinstance(text, str):
        return False
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            return False
        if isinstance(node, ast.Attribute) and node.attr not in _ATTRIBUTES and not _is_sympy_function(node.attr):
            return False
        if isinstance(node, ast.Name) and (node.id.startswith("_") or not _SYMBOL.fullmatch(node.id)):
            return False
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not _is_callable(node.func.id):
            return False
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not _TEXT.fullmatch(node.value):
            return False
    return True


def _is_sympy_function(name: str) -> bool:
    """Names of torch's sympy functions (`FloorDiv`, `PythonMod`...) start with a capital letter."""
    return name[:1].isupper() and name.isidentifier()


def _is_callable(name: str) -> bool:
    if name in {"S", "Lambda", "Function", "Wild"}:
        return False  # these evaluate or define
    return _is_sympy_function(name) or name in {"ceiling", "floor", "max", "min", "abs", "int", "float", "bool", "len"}


def _untrusted(path: Path, what: str) -> ArtifactError:
    return ArtifactError(
        f"{path} holds {what}, which can run code when it is loaded. If you trust its origin, load it with "
        "trust_remote_code=True.",
        stage="load",
        backend="dynamo",
    )
