from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import polyport
from polyport import discovery
from polyport.errors import BackendLoadError, BackendNotInstalled

SNAPSHOT = Path(__file__).with_name("public_api.txt")

#: Importing these takes seconds, or isn't possible where the plugin they belong to isn't installed.
HEAVY = (
    "torch",
    "transformers",
    "numpy",
    "onnx",
    "onnxruntime",
    "onnx_ir",
    "onnxscript",
    "openvino",
    "executorch",
)


def _public() -> Iterator[tuple[str, Any]]:
    for name in sorted(polyport.__all__):
        value = getattr(polyport, name)
        yield name, value
        if inspect.isclass(value):
            for attribute, member in sorted(vars(value).items()):
                if attribute == "__call__" or not attribute.startswith("_"):
                    yield f"{name}.{attribute}", getattr(member, "__func__", member)


def _lines() -> Iterator[str]:
    for name, value in _public():
        if isinstance(value, property):
            yield f"{name}: property"
        elif callable(value):
            yield f"{name}{inspect.signature(value)}"


def test_snapshot() -> None:
    """A change of a public name or signature is a decision, and belongs in the changelog.

    To accept it, write what `_lines` yields to `public_api.txt`.
    """
    assert list(_lines()) == SNAPSHOT.read_text(encoding="utf-8").splitlines()


def test_everything_public_has_a_docstring() -> None:
    documented = [name for name, value in _public() if callable(value) or isinstance(value, property)]
    assert documented
    without = [name for name, value in _public() if name in documented and not inspect.getdoc(value)]
    assert without == []


def test_names_are_listed() -> None:
    assert dir(polyport) == sorted(polyport.__all__)
    assert polyport.__version__


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = polyport.nothing
    for name in ("Config", "Exporter", "onnxConfig", "__path_config__"):
        assert not hasattr(polyport, name)


@pytest.mark.parametrize(
    "statement", ["import polyport", "import polyport.errors, polyport.cli", "import polyport.config"]
)
def test_importing_is_light(statement: str) -> None:
    code = f"{statement}; import sys; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_classes_of_backends_are_importable_from_here(fake_backend: str) -> None:
    from polyport import FakeConfig, FakeExporter  # type: ignore[attr-defined]

    assert FakeConfig(level=3).level == 3
    assert FakeExporter.export_format == "fake"


def test_classes_of_backends_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "installed", lambda group=discovery.BACKENDS: [])
    with pytest.raises(BackendNotInstalled, match=r"OnnxExporter belongs to .*: pip install polyport-onnx$"):
        from polyport import OnnxExporter  # noqa: F401
    with pytest.raises(ImportError, match=r"pip install polyport-openvino$"):
        from polyport import OpenVINOConfig  # noqa: F401


def test_installing_after_asking(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """As in a notebook: the failed import must not be remembered."""
    with pytest.raises(BackendNotInstalled):
        _ = polyport.FakeExporter
    request.getfixturevalue("fake_backend")
    assert polyport.FakeExporter.__name__ == "FakeExporter"


def test_classes_of_backends_that_are_broken(install: Any) -> None:
    """Installed is not the same as working, and the advice differs."""
    install(
        "polyport-broken",
        entry_points={"polyport.backends": {"broken": "broken_x"}},
        modules={"broken_x": "1 / 0"},
    )
    with pytest.raises(BackendLoadError, match=r"polyport-broken 1\.0 could not be imported"):
        _ = polyport.BrokenExporter
