"""The `executorch` backend of polyport: programs for phones and other small devices, run by ExecuTorch."""

from __future__ import annotations

from polyport.exporter import HfExporter
from polyport_executorch.__about__ import __version__
from polyport_executorch.config import ExecutorchConfig
from polyport_executorch.recipes import Recipe

__all__ = ["ExecutorchConfig", "ExecutorchExporter", "Recipe", "__version__"]


class ExecutorchExporter(HfExporter):
    """Exports a model to an `executorch.exir.ExecutorchProgramManager`."""

    export_format = "executorch"
