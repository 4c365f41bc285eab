"""Models of every kind, from sample inputs to the right values out of a saved export, in every format.

The whole zoo takes too long for a test; `tools/sweep.py` runs it. These cases are one or two of each kind, the hard ones
among them. Each is exported once, with a batch of 2 as the sample and nothing said about its axes but `dynamic=True`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import polyport

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]

import sweep_case  # noqa: E402
import zoo  # noqa: E402

FORMATS = ["dynamo", "onnx", "openvino"]

CASES = [
    # text encoders: relative positions by buckets, local attention, an extra axis of choices
    "bert",
    "deberta_v2",
    "modernbert",
    "bert_multiple_choice",
    # language models: sliding window, ALiBi, experts, state space and hybrids
    "gemma3_text",
    "bloom",
    "deepseek_v3",
    "gpt_oss",
    "bamba",
    "lfm2",
    # encoder-decoders over text and speech
    "t5",
    "whisper",
    "speech_to_text",
    # vision: interpolated positions, image sizes that vary, masked pixels, prompts of points
    "dinov2",
    "detr",
    "sam",
    # audio: strided convolutions over a padded waveform
    "wav2vec2",
    # several modalities: two towers, image features among the tokens, layout
    "clip",
    "gemma3",
    "layoutlm",
    # time series, control
    "patchtst",
    "decision_transformer",
]


@attrs.frozen
class Exported:
    """A case with its exports, saved."""

    model: Any
    inputs: Mapping[str, zoo.Inputs]
    folder: Path


@pytest.fixture(scope="module", params=CASES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    model, sample, other, _ = zoo.build_all(request.param)
    shapes = {"sample": sample, "other shape": other, "batch 1": zoo.single(request.param)}
    configs = [{"export_format": name, "dynamic": True} for name in FORMATS]
    folder = tmp_path_factory.mktemp(request.param)
    for name, export in polyport.export(model, sample, configs).items():
        export.save_pretrained(folder / name)
    return Exported(model, {shape: inputs for shape, inputs in shapes.items() if inputs is not None}, folder)


@pytest.mark.parametrize("export_format", FORMATS)
def test_the_loaded_export_computes_what_the_model_computes(exported: Exported, export_format: str) -> None:
    loaded = polyport.ExportedModel.from_pretrained(exported.folder / export_format)
    for shape, inputs in exported.inputs.items():
        with torch.no_grad():
            expected = exported.model(**inputs)
        got = loaded(**inputs)
        assert type(got) is type(expected), shape
        result = sweep_case.compare(expected, got)
        assert result["ok"], f"{shape}: {result['error']}"


def test_every_modality_is_among_the_cases() -> None:
    assert {zoo.CASES[name].modality for name in CASES} == {case.modality for case in zoo.CASES.values()}
