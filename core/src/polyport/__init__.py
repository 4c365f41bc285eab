"""Export Hugging Face models to the runtimes they are deployed on, and run them there.

The names of installed backends' exporters and configs are importable from here too
(`from polyport import OnnxExporter`). Nothing is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from polyport.__about__ import __version__

if TYPE_CHECKING:
    from polyport.artifact import ExportedModel
    from polyport.config import ExportConfig
    from polyport.errors import PolyportError
    from polyport.exporter import AutoExportConfig, AutoHfExporter, HfExporter, export, export_for_generation
    from polyport.generation.decompose import decompose_for_generation
    from polyport.metadata import ExportMetadata
    from polyport.pipeline import ExportedComponent
    from polyport.session import Session

__all__ = [
    "AutoExportConfig",
    "AutoHfExporter",
    "ExportConfig",
    "ExportMetadata",
    "ExportedComponent",
    "ExportedModel",
    "HfExporter",
    "PolyportError",
    "Session",
    "__version__",
    "decompose_for_generation",
    "export",
    "export_for_generation",
]

_HOMES = {
    "AutoExportConfig": "polyport.exporter",
    "AutoHfExporter": "polyport.exporter",
    "ExportConfig": "polyport.config",
    "ExportMetadata": "polyport.metadata",
    "ExportedComponent": "polyport.pipeline",
    "ExportedModel": "polyport.artifact",
    "HfExporter": "polyport.exporter",
    "PolyportError": "polyport.errors",
    "Session": "polyport.session",
    "decompose_for_generation": "polyport.generation.decompose",
    "export": "polyport.exporter",
    "export_for_generation": "polyport.exporter",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    for ending in ("Exporter", "Config"):
        if name.endswith(ending) and name != ending and name[0].isupper():
            return _backend_class(name, name.removesuffix(ending))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _backend_class(name: str, backend: str) -> Any:
    from polyport.discovery import installed
    from polyport.errors import BackendNotInstalled
    from polyport.session import Session, backend_class

    found = backend_class(name)
    if found is not None:
        return found
    # by convention, the format is the class's name in lower case and comes from the distribution polyport-<format>
    export_format = backend.lower()
    if any(plugin.name == export_format for plugin in installed()):
        known = Session(export_format).backend  # or it says what is wrong with it
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}: the classes of the backend {export_format!r} are "
            f"{known.exporter} and {known.config_class.__name__}"
        )
    raise BackendNotInstalled(
        f"{name} belongs to a backend that is not installed: pip install polyport-{export_format}",
        backend=export_format,
    )


def __dir__() -> list[str]:
    return sorted(__all__)
