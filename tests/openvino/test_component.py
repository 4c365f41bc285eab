"""What an export's model looks like: names, axes, types, weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openvino as ov
import pytest
import torch

import polyport
from polyport import ExportedModel
from polyport_openvino import OpenVINOConfig, OpenVINOExporter


def nodes(exported: ExportedModel) -> dict[str, Any]:
    return {node.get_friendly_name(): node for node in exported.program.get_ordered_ops()}


def test_ports_have_the_names_of_the_leaves(exported: ExportedModel) -> None:
    model, metadata = exported.program, exported["model"].metadata
    assert [port.get_any_name() for port in model.inputs] == list(metadata.input_names)
    assert [port.get_any_name() for port in model.outputs] == list(metadata.output_names)
    assert model.get_friendly_name() == "model"


def test_axes_are_named(exported: ExportedModel) -> None:
    layouts = {p.get_friendly_name(): str(p.layout) for p in exported.program.get_parameters()}
    assert layouts == dict.fromkeys(("input_ids", "attention_mask"), "[N,SEQUENCE]")
    results = {r.get_friendly_name(): str(r.get_layout()) for r in exported.program.get_results()}
    assert results == {"last_hidden_state": "[N,SEQUENCE,?]", "pooler_output": "[N,?]"}
    shapes = [port.get_partial_shape() for port in exported.program.outputs]
    assert [[axis.is_dynamic for axis in shape] for shape in shapes] == [[True, True, False], [True, False]]


def test_weights_and_operators_have_the_names_of_the_model(exported: ExportedModel, saved: Path) -> None:
    there = ov.Core().read_model(saved / "openvino_model.xml")
    loaded = {node.get_friendly_name(): node.get_type_name() for node in there.get_ordered_ops()}
    weight = "encoder.layer.1.attention.self.query.weight"
    assert nodes(exported)[weight].get_type_name() == loaded[weight] == "Constant"
    # what comes from one module is found together
    assert loaded["encoder.layer.1.attention.self.query/linear_6"] == "Add"


def test_an_input_that_nothing_reads_stays() -> None:
    class Ignores(torch.nn.Module):
        def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
            return x * 2

    from polyport_openvino.lowering import lower_program

    args = (torch.ones(2, 3), torch.ones(4, dtype=torch.int64))
    lowered = lower_program(
        torch.export.export(Ignores(), args), input_names=["x", "unused"], output_names=["y"]
    )
    assert [port.get_any_name() for port in lowered.model.inputs] == ["x", "unused"]
    assert str(lowered.model.inputs[1].get_element_type()) == str(ov.Type.i64)
    got = ov.Core().compile_model(lowered.model, "CPU")([arg.numpy() for arg in args])["y"]
    assert torch.equal(torch.from_numpy(got), args[0] * 2)


@pytest.mark.parametrize("shape", [(1, 5), (3, 9)])
def test_weights_in_half_precision(
    tiny_bert: Any, token_ids: Any, tmp_path: Path, saved: Path, shape: tuple[int, int]
) -> None:
    config = OpenVINOConfig(dynamic=True, compress_to_fp16=True)
    exported = OpenVINOExporter().export(tiny_bert, token_ids(1, 5), config)
    exported.save_pretrained(tmp_path / "export")
    sizes = [(folder / "openvino_model.bin").stat().st_size for folder in (tmp_path / "export", saved)]
    assert sizes[0] < 0.55 * sizes[1]
    inputs = token_ids(*shape)
    with torch.no_grad():
        expected = tiny_bert(**inputs).last_hidden_state
    for one in (exported, ExportedModel.from_pretrained(tmp_path / "export")):
        got = one(**inputs).last_hidden_state
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-2)
        assert not torch.equal(got, expected)


@pytest.mark.parametrize("option", ["stateful", "compress_to_fp16"])
def test_options_are_true_or_false(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        OpenVINOConfig(**{option: "yes"})


def test_a_name_in_other_capitals_is_told_from_a_missing_backend() -> None:
    with pytest.raises(AttributeError, match="OpenVINOExporter and OpenVINOConfig"):
        polyport.OpenvinoExporter  # noqa: B018
    assert polyport.OpenVINOExporter is OpenVINOExporter
