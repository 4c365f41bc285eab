"""The `dynamo` backend of polyport: models as `torch.export.ExportedProgram`, saved as `.pt2`, run by PyTorch."""

from __future__ import annotations

from polyport.exporter import HfExporter
from polyport_dynamo.__about__ import __version__
from polyport_dynamo.config import DynamoConfig

__all__ = ["DynamoConfig", "DynamoExporter", "__version__"]


class DynamoExporter(HfExporter):
    """Exports a model to a `torch.export.ExportedProgram`."""

    export_format = "dynamo"
