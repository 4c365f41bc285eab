"""The `aoti` backend of polyport: models compiled ahead of time by AOTInductor, run without tracing anything again."""

from __future__ import annotations

from polyport.exporter import HfExporter
from polyport_aoti.__about__ import __version__
from polyport_aoti.config import AotiConfig

__all__ = ["AotiConfig", "AotiExporter", "__version__"]


class AotiExporter(HfExporter):
    """Compiles a model to an AOTInductor package."""

    export_format = "aoti"
