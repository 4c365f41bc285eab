"""Options of the openvino backend."""

from __future__ import annotations

from typing import ClassVar

import attrs

from polyport.config import ExportConfig


@attrs.frozen(kw_only=True)
class OpenVINOConfig(ExportConfig):
    """Options of an OpenVINO model.

    Args:
        compress_to_fp16: Store float32 weights as float16, which halves the files and rounds the weights. They are computed
            with in the precision that the runner is told.
        stateful: Keep caches that a call takes and returns inside the runtime, as variables of the model with an input
            `beam_idx` that reorders their rows; false makes them inputs and outputs.
    """

    export_format: ClassVar[str] = "openvino"

    compress_to_fp16: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    stateful: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
