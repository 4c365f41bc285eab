"""Core's own hook implementations: what every format does unless its backend says otherwise.

Registered first in every session, so that any plugin is asked before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyport.config import ExportConfig
from polyport.errors import ConfigError
from polyport.hookspecs import PatchStage, QuantizeStage
from polyport.markers import hookimpl
from polyport.patching import GraphFix, Patch
from polyport.pipeline import CapturedCall


@hookimpl
def polyport_capture(
    model: Any, inputs: Mapping[str, Any], config: ExportConfig, pinned: frozenset[str]
) -> CapturedCall:
    from polyport.capture import capture

    return capture(model, inputs, config, pinned)


@hookimpl
def polyport_patch(stage: PatchStage, config: ExportConfig) -> Sequence[Patch | GraphFix]:
    return ()


@hookimpl
def polyport_quantize(target: Any, config: ExportConfig, stage: QuantizeStage) -> Any:
    quantizer = config.quantizer
    if not callable(getattr(quantizer, "quantize", None)):
        raise ConfigError(
            f"`quantizer` is {type(quantizer).__name__}, which has no `quantize` method.", stage="quantize"
        )
    return quantizer.quantize(target, config, stage)
