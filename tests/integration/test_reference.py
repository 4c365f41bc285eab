"""Facts that are stated in two places must be the same in both."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from polyport.session import Session

ROOT = Path(__file__).resolve().parents[2]


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
SESSIONS = reference.backends()


@pytest.mark.parametrize("page", ["config.md", "fixes.md"])
def test_reference_is_up_to_date(page: str) -> None:
    """If this fails: python tools/generate_reference.py."""
    assert (ROOT / "docs" / "reference" / page).read_text() == reference.PAGES_BY_NAME[page]()


@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.format)
def test_a_backend_supports_what_its_distribution_requires(session: Session) -> None:
    required = {
        requirement.name: requirement.specifier for requirement in map(Requirement, session.plugin.requires)
    }
    supported = {name: SpecifierSet(versions) for name, versions in session.backend.packages.items()}
    assert supported == {name: required[name] for name in supported}


@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.format)
def test_a_backend_is_tested_with_the_constrained_versions(session: Session) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    assert session.backend.tested == {name: pinned[name] for name in session.backend.tested}
    assert set(session.backend.tested) == set(session.backend.packages)


@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.format)
def test_classes_are_where_they_are_expected(session: Session) -> None:
    import polyport

    assert getattr(polyport, session.backend.exporter) is session.exporter()
    assert getattr(polyport, session.backend.config_class.__name__) is session.backend.config_class
    assert importlib.metadata.version(session.plugin.distribution) == session.plugin.version
