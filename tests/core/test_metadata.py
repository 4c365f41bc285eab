from __future__ import annotations

import json
from typing import Any

import pytest

from polyport.errors import ArtifactError
from polyport.metadata import AxisRange, ExportMetadata, TensorInfo


def _metadata() -> ExportMetadata:
    return ExportMetadata(
        architecture="BertModel",
        packages={"torch": "2.13.0"},
        export_config={"export_format": "toy", "dynamic": True},
        export_dtype="float32",
        export_device="cpu",
        kwargs={"x": {"rank": 2, "shape": [2, 3], "dtype": "torch.float32"}},
        in_spec="[1, {}]",
        out_spec="[1, {}]",
        in_constants={"use_cache": False},
        out_constants=[[1, "text"]],
        inputs=(TensorInfo("x", "float32", ("batch", 3)),),
        outputs=(TensorInfo("cache.layers.0.keys", "float16", ("batch", "2*past", 4)),),
        axes={"batch": AxisRange(1, 8), "past": AxisRange(0)},
        defaults={"attention_mask": "ones_like:x"},
        patches=("toy-fix",),
        backend={"anything": [1, None, {"a": 0.5}]},
    )


def test_round_trip_through_json() -> None:
    metadata = _metadata()
    assert ExportMetadata.from_dict(json.loads(json.dumps(metadata.to_dict()))) == metadata


def test_empty_record_round_trip() -> None:
    assert ExportMetadata.from_dict(ExportMetadata().to_dict()) == ExportMetadata()


def test_names_and_axes() -> None:
    metadata = _metadata()
    assert metadata.input_names == ("x",)
    assert metadata.output_names == ("cache.layers.0.keys",)
    assert metadata.dynamic_axes == {"x": {0: "batch"}}
    assert metadata.inputs[0].rank == 2
    assert metadata.constant_outputs() == {1: "text"}


def test_fields_of_a_newer_version_are_left_out() -> None:
    assert ExportMetadata.from_dict({"architecture": "A", "of_the_future": 1}) == ExportMetadata(
        architecture="A"
    )


@pytest.mark.parametrize(
    "values",
    [
        {"architecture": 3},
        {"architecture": {"a": 1}},
        {"packages": ["torch"]},
        {"packages": {"torch": 2}},
        {"inputs": [{"name": "x", "dtype": "float32", "shape": [1.5]}]},
        {"inputs": [{"name": "x", "dtype": "float32", "shape": [True]}]},
        {"inputs": [{"name": "x", "dtype": 5, "shape": []}]},
        {"inputs": [{"name": "x"}]},
        {"inputs": 7},
        {"axes": {"batch": {"min": "1"}}},
        {"axes": {"batch": {"min": 1.9}}},
        {"axes": ["batch"]},
        {"patches": [1]},
        {"defaults": {"x": None}},
        {"in_spec": ["tuple"]},
    ],
)
def test_wrong_types_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match="metadata can't be read"):
        ExportMetadata.from_dict(values)


@pytest.mark.parametrize("constants", [[1], [[0]], [["0", 1]], ["ab"], [[0, 1, 2]]])
def test_damaged_constants(constants: list[Any]) -> None:
    with pytest.raises(ArtifactError, match="constant outputs"):
        ExportMetadata(out_constants=constants).constant_outputs()
