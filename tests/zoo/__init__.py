"""A zoo of 125 tiny models with random weights: real architectures with real heads, milliseconds each on one core.

* `names()`: the cases; `CASES[name]` has their task and modality.
* `generative()`: those that generate; `padded_prompts(name)` has two prompts of different lengths for them.
* `build(name)`: `(model, forward inputs, generate inputs or None)`.
* `alt_inputs(name)`: forward inputs of another batch and length or image size; `single(name)`: of batch 1.
* `build_all(name)`: everything from one build.

Weights and inputs are seeded: the same values in every process. Forward keeps no cache, generation does.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from .cases import CASES, Built, Case, Inputs, built, two_lengths

os.environ.setdefault("HF_HUB_OFFLINE", "1")

__all__ = [
    "CASES",
    "Built",
    "Case",
    "Inputs",
    "alt_inputs",
    "build",
    "build_all",
    "built",
    "generative",
    "names",
    "padded_prompts",
    "single",
]

# Importing a module registers its cases; this is their order.
for _module in (
    "text_encoders",
    "decoders",
    "sparse_decoders",
    "encoder_decoders",
    "vision",
    "detection",
    "audio",
    "multimodal",
    "captioning",
    "vision_language",
    "other",
):
    importlib.import_module(f"{__name__}.{_module}")


def names() -> list[str]:
    """Names of all cases."""
    return list(CASES)


def generative() -> list[str]:
    """Names of the cases that generate. Builds them all."""
    return [name for name in CASES if built(name).generate is not None]


def build(name: str) -> tuple[Any, Inputs, Inputs | None]:
    """The model, its forward inputs (batch 2), and its generate inputs where it generates."""
    made = built(name)
    return made.model, made.inputs(2, made.size), made.generate


def alt_inputs(name: str) -> Inputs | None:
    """Forward inputs of another batch size and length; None where the model takes no other shape."""
    made = built(name)
    return None if made.alt is None else made.inputs(*made.alt)


def single(name: str) -> Inputs:
    """Forward inputs of batch 1, at the sample's size."""
    made = built(name)
    return made.inputs(1, made.size)


def build_all(name: str) -> tuple[Any, Inputs, Inputs | None, Inputs | None]:
    """The model, its forward inputs, those of another shape, and its generate inputs."""
    made = built(name)
    alt = None if made.alt is None else made.inputs(*made.alt)
    return made.model, made.inputs(2, made.size), alt, made.generate


def padded_prompts(name: str) -> Inputs:
    """Generate inputs of two rows of different lengths: the first is the sample's, padded where its kind of model wants it.

    Prompts of decoders are padded on the left, what encoders read on the right.
    """
    made = built(name)
    assert made.generate is not None, name
    return two_lengths(made.generate, left=not made.model.config.is_encoder_decoder)
