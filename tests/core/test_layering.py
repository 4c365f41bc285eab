"""Who may know whom: what the sources say, read as tokens, so that prose is free to mention what code may not."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "src" / "polyport"
SOURCES = sorted(CORE.rglob("*.py"))

#: Runtimes, formats and packages of backends. `dynamo` alone is also the name of a part of torch.
_BACKEND = re.compile(
    r"onnx|openvino|executorch|nncf|torchao|aoti|polyport_dynamo|(?<![._])\bdynamo\b", re.IGNORECASE
)

_TEXT_SUFFIXES = {".py", ".md", ".toml", ".ini", ".txt", ".yml", ".yaml", ".cfg", ".json", ".sh"}


def _docstrings(source: str) -> set[tuple[int, int]]:
    """Where docstrings begin: the first statement of a module, class or function, and the text below an attribute."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            found.add((node.lineno, node.col_offset))
    return found


def _code(path: Path) -> Iterator[tuple[int, str]]:
    """Names and texts of a file, without comments and docstrings."""
    source = path.read_text(encoding="utf-8")
    docstrings = _docstrings(source)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NAME, tokenize.STRING) and token.start not in docstrings:
            yield token.start[0], token.string


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """Comments and docstrings of a file."""
    source = path.read_text(encoding="utf-8")
    docstrings = _docstrings(source)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or token.start in docstrings:
            yield token.start[0], token.string


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(CORE)) for path in SOURCES])
def test_core_names_no_backend(path: Path) -> None:
    named = [f"{path}:{line}: {text}" for line, text in _code(path) if _BACKEND.search(text)]
    assert named == []


def test_what_the_check_sees(tmp_path: Path) -> None:
    """A check that finds nothing must be one that could."""
    path = tmp_path / "sample.py"
    path.write_text(
        '"""About onnx."""\n# onnx\nimport torch._dynamo\nx = "onnxruntime"\ny = OnnxConfig\nz = "dynamo"\n'
        'def f():\n    """openvino"""\n    return f"{x} executorch"\n'
    )
    lines = [line for line, text in _code(path) if _BACKEND.search(text)]
    assert [line for line in lines if line < 7] == [4, 5, 6]
    assert [line for line, text in _prose(path) if _BACKEND.search(text)] == [1, 2, 8]


def _files() -> list[Path]:
    skipped = {
        ".git",
        ".tox",
        ".mypy_cache",
        ".ruff_cache",
        ".pytest_cache",
        "__pycache__",
        "dist",
        "build",
        "node_modules",
    }
    return [
        path
        for path in sorted(ROOT.rglob("*"))
        if path.is_file()
        and path.suffix in _TEXT_SUFFIXES
        and not skipped & set(path.relative_to(ROOT).parts)
    ]


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_nobody_imports_transformers_exporters() -> None:
    """What measures itself against it must not stand on it."""
    found = [
        str(path.relative_to(ROOT))
        for path in _files()
        if path.suffix == ".py" and any(name.startswith("transformers.exporters") for name in _imports(path))
    ]
    assert found == []


def test_tests_and_docs_stay_out_of_the_core() -> None:
    found = [
        path
        for path in SOURCES
        if any(name.split(".")[0] in ("tests", "tools", "examples") for name in _imports(path))
    ]
    assert found == []


def test_modules_are_short() -> None:
    """A module that has grown has become two."""
    long = {
        str(path.relative_to(ROOT)): length
        for path in sorted(ROOT.glob("core/src/**/*.py")) + sorted(ROOT.glob("plugins/*/src/**/*.py"))
        if (length := len(path.read_text(encoding="utf-8").splitlines())) > 330
    }
    assert long == {}
