"""The `onnx` backend of polyport: models as ONNX graphs, run by ONNX Runtime."""

from __future__ import annotations

from polyport.exporter import HfExporter
from polyport_onnx.__about__ import __version__
from polyport_onnx.config import OnnxConfig

__all__ = ["OnnxConfig", "OnnxExporter", "__version__"]


class OnnxExporter(HfExporter):
    """Exports a model to an `onnx_ir.Model`."""

    export_format = "onnx"
