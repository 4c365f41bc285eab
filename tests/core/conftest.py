"""Fake distributions: what pip would have installed, written to a folder on `sys.path`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from polyport import ExportedModel
from polyport.metadata import AxisRange, ExportMetadata, TensorInfo
from polyport.pipeline import ExportedComponent

Install = Callable[..., Path]

#: A whole backend. Its program is bytes; its runner returns what it got, doubled.
FAKE_BACKEND = '''
from typing import ClassVar

import attrs

from polyport import ExportConfig, HfExporter
from polyport.markers import hookimpl
from polyport.pipeline import BackendInfo, ExportedComponent


@attrs.frozen(kw_only=True)
class FakeConfig(ExportConfig):
    """The config of the fake backend."""

    export_format: ClassVar[str] = "fake"
    level: int = attrs.field(default=1, validator=attrs.validators.instance_of(int))


class FakeExporter(HfExporter):
    """The exporter of the fake backend."""

    export_format = "fake"


class Runner:
    device = "cpu"

    def __call__(self, inputs):
        return [tensor * 2 for tensor in inputs]


@hookimpl
def polyport_backend():
    return BackendInfo(
        format="fake",
        config_class=FakeConfig,
        exporter="FakeExporter",
        suffix=".fake",
        summary="for tests",
        companions=("{file}.data",),
    )


@hookimpl
def polyport_trace(call, config):
    raise NotImplementedError


@hookimpl
def polyport_lower(traced, config):
    raise NotImplementedError


@hookimpl
def polyport_save(components, directory):
    written = {}
    for name, component in components.items():
        files = [f"{name}.fake"]
        (directory / files[0]).write_bytes(component.program)
        if component.metadata.backend.get("data"):
            files.append(f"{name}.fake.data")
            (directory / files[1]).write_bytes(b"weights of " + component.program)
        written[name] = files
    return written


@hookimpl
def polyport_load(files, metadata, trust):
    return files[0].read_bytes()


@hookimpl
def polyport_run(component, request):
    request.take(threads=1)
    return Runner()
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution: its metadata, its entry points and its modules."""
    before = set(sys.modules)
    count = 0

    def make(
        name: str,
        *,
        version: str = "1.0",
        requires: Sequence[str] = (),
        entry_points: Mapping[str, Mapping[str, str]] | None = None,
        modules: Mapping[str, str] | None = None,
    ) -> Path:
        nonlocal count
        count += 1
        site = tmp_path / f"site-{count}"
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
        (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines]) + "\n")
        sections = [
            f"[{group}]\n" + "\n".join(f"{key} = {value}" for key, value in points.items())
            for group, points in (entry_points or {}).items()
        ]
        (info / "entry_points.txt").write_text("\n".join(sections) + "\n")
        for module, source in (modules or {}).items():
            (site / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(site)
        importlib.invalidate_caches()
        return site

    yield make
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def fake_backend(install: Install) -> str:
    """A working backend of the format `fake`; returns the format."""
    install(
        "polyport-fake",
        entry_points={"polyport.backends": {"fake": "polyport_fake"}},
        modules={"polyport_fake": FAKE_BACKEND},
    )
    return "fake"


@pytest.fixture
def make_export(fake_backend: str) -> Callable[..., ExportedModel]:
    """An export of the fake format that takes `x` float32[batch, 3] and returns it doubled."""

    def make(program: bytes = b"program", **options: Any) -> ExportedModel:
        backend = {"data": True} if options.pop("data", False) else {}
        shape = ("batch", 3)
        metadata = ExportMetadata(
            inputs=(TensorInfo("x", "float32", shape),),
            outputs=(TensorInfo("y", "float32", shape),),
            axes={"batch": AxisRange()},
            export_dtype="float32",
            backend=backend,
        )
        names = options.pop("components", ("model",))
        components = {name: ExportedComponent(program=program, metadata=metadata) for name in names}
        return ExportedModel(fake_backend, components, **options)

    return make
