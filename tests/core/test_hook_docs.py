from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import pytest

from polyport import hookspecs

ROOT = Path(__file__).resolve().parents[2]
HOOKS = [spec for name, spec in vars(hookspecs).items() if name.startswith("polyport_")]


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "generate_reference", ROOT / "tools" / "generate_reference.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = _generator()


def _first_result(spec: object) -> bool:
    options = getattr(spec, "polyport_spec", {})
    return bool(options["firstresult"])


@pytest.mark.parametrize("spec", HOOKS)
def test_docstring_has_its_parts_in_order(spec: object) -> None:
    """One line; when it is called; arguments; what it returns; what it raises."""
    parts = reference.sections(spec)
    summary, blank, *rest = parts[""].splitlines()
    assert summary.endswith(".")
    assert blank == ""
    assert rest[0].startswith("Called ")
    assert [part for part in ("", "Args", "Returns", "Raises") if part in parts] == list(parts)
    assert "Returns" in parts


@pytest.mark.parametrize("spec", HOOKS)
def test_every_argument_is_documented(spec: object) -> None:
    documented = reference.entries(reference.sections(spec).get("Args", ""))
    assert list(documented) == list(inspect.signature(spec).parameters)  # type: ignore[arg-type]
    assert all(documented.values())


@pytest.mark.parametrize("spec", [spec for spec in HOOKS if _first_result(spec)])
def test_docstring_says_what_none_means(spec: object) -> None:
    assert "None" in reference.sections(spec)["Returns"]


@pytest.mark.parametrize("spec", HOOKS)
def test_signature_suits_pluggy(spec: object) -> None:
    signature = inspect.signature(spec)  # type: ignore[arg-type]
    for parameter in signature.parameters.values():
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        assert parameter.default is parameter.empty
        assert parameter.annotation is not parameter.empty
    assert signature.return_annotation is not signature.empty
    if not _first_result(spec):
        assert spec is hookspecs.polyport_patch


@pytest.mark.parametrize("spec", HOOKS)
def test_reference_has_the_exact_signature(spec: object) -> None:
    page = (ROOT / "docs" / "reference" / "hooks.md").read_text()
    name = spec.__name__  # type: ignore[attr-defined]
    assert f"## {name}\n\n```python\n{reference.signature(spec)}\n```" in page


@pytest.mark.parametrize("page", ["hooks.md", "errors.md"])
def test_reference_is_up_to_date(page: str) -> None:
    """If this fails: python tools/generate_reference.py."""
    assert (ROOT / "docs" / "reference" / page).read_text() == reference.PAGES_BY_NAME[page]()
