"""What an author of a backend says about it, and the fixtures that the tests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from polyport.session import Session
from polyport.testing.models import EXAMPLES
from polyport.testing.workbench import Workbench


class Suite:
    """Base of the groups of tests; see `polyport.testing.BackendConformance` for its attributes."""

    format: ClassVar[str] = ""
    config_options: ClassVar[Mapping[str, Any]] = {}
    generation_options: ClassVar[Mapping[str, Any]] = {}
    tolerances: ClassVar[Mapping[str, tuple[float, float]]] = {"float32": (1e-4, 1e-4)}
    examples: ClassVar[Sequence[str]] = tuple(EXAMPLES)
    supports_dynamic: ClassVar[bool] = True
    deterministic_bytes: ClassVar[bool] = True
    loading_needs_trust: ClassVar[bool] = False

    @pytest.fixture(scope="class")
    @classmethod
    def workbench(cls, tmp_path_factory: pytest.TempPathFactory) -> Workbench:
        """Models and exports, made once for the class."""
        return Workbench(cls, tmp_path_factory.mktemp(f"conformance-{cls.format}"))

    @pytest.fixture
    def session(self) -> Session:
        """The hooks of the format."""
        return Session(self.format)

    @pytest.fixture
    def copy(self, workbench: Workbench, tmp_path: Path) -> Path:
        """A copy of the saved export of the first example, for tests that change it."""
        import shutil

        return Path(shutil.copytree(workbench.saved(self.examples[0]), tmp_path / "copy"))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per example model, per precision, and per attack, for the tests that ask for it."""
        from polyport.testing.hostile import ATTACKS

        if "example" in metafunc.fixturenames:
            metafunc.parametrize("example", self.examples)
        if "precision" in metafunc.fixturenames:
            metafunc.parametrize("precision", list(self.tolerances))
        if "attack" in metafunc.fixturenames:
            metafunc.parametrize("attack", list(ATTACKS))
