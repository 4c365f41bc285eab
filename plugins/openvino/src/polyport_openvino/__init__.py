"""The `openvino` backend of polyport: models as OpenVINO IR, run on Intel CPUs, GPUs and NPUs."""

from __future__ import annotations

from polyport.exporter import HfExporter
from polyport_openvino.__about__ import __version__
from polyport_openvino.config import OpenVINOConfig

__all__ = ["OpenVINOConfig", "OpenVINOExporter", "__version__"]


class OpenVINOExporter(HfExporter):
    """Exports a model to an `openvino.Model`."""

    export_format = "openvino"
