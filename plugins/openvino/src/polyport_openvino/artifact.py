"""Saving and loading OpenVINO IR."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import openvino as ov

from polyport.errors import ArtifactError
from polyport_openvino.devices import core


def save_models(models: Mapping[str, ov.Model], folder: Path) -> dict[str, tuple[str, ...]]:
    """Write the models of an export.

    Returns:
        Component name -> names of its files, the graph file first.
    """
    files: dict[str, tuple[str, ...]] = {}
    for name, model in models.items():
        stem = f"openvino_{name}"
        ov.save_model(model, folder / f"{stem}.xml", compress_to_fp16=False)
        files[name] = (f"{stem}.xml", f"{stem}.bin")
    return files


def load_model(files: Sequence[Path]) -> ov.Model:
    """Read a model; its weights are mapped from their file.

    Raises:
        ArtifactError: The files are damaged.
    """
    try:
        return core().read_model(*files)
    except Exception as error:
        raise ArtifactError(
            f"{files[0]} is no readable OpenVINO model: {error}", stage="load", backend="openvino"
        ) from error


def describe_model(model: ov.Model) -> dict[str, Any]:
    """Operators of a model, and its variables."""
    return {"operators": dict(Counter(node.get_type_name() for node in model.get_ordered_ops()))}
