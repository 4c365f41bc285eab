"""Options of the onnx backend."""

from __future__ import annotations

from typing import ClassVar

import attrs

from polyport.config import ExportConfig


def _whole_number(_: object, attribute: attrs.Attribute[int], value: object) -> None:
    if type(value) is not int:  # True is an int for Python
        raise TypeError(f"'{attribute.name}' must be an int, not {value!r}")


@attrs.frozen(kw_only=True)
class OnnxConfig(ExportConfig):
    """Options of an ONNX graph.

    Args:
        opset_version: Version of the ONNX operator set; None for the one this plugin is tested with.
        optimize: Fold constants and remove what has no effect.
    """

    export_format: ClassVar[str] = "onnx"

    opset_version: int | None = attrs.field(default=None, validator=attrs.validators.optional(_whole_number))
    optimize: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
