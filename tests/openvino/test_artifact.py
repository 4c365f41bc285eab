"""Files: what is written, what may be moved, and what is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as opset
import pytest
import torch
from openvino_graphs import export, graph, infos, sums

from polyport import ExportedModel
from polyport.errors import ArtifactError
from polyport_openvino import OpenVINOConfig, OpenVINOExporter
from polyport_openvino.artifact import describe_model, load_model, operators, save_models

WEIGHT = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
EXPECTED = float(WEIGHT.astype(np.float64).sum())
XML, BIN = "openvino_model.xml", "openvino_model.bin"


def _sum(exported: ExportedModel) -> float:
    return float(exported(x=torch.zeros(64, 64))["y"].double().sum())


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export(model=sums(WEIGHT)).save_pretrained(tmp_path / "out")
    return tmp_path / "out"


# ── written ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_graph_and_weights_are_two_files(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "export.json", BIN, XML]


def test_openvino_reads_it_alone(saved: Path, tiny_bert: Any, token_ids: Any) -> None:
    compiled = ov.Core().compile_model(str(saved / XML), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    inputs = token_ids(3, 4)
    with torch.no_grad():
        expected = tiny_bert(**inputs).last_hidden_state
    got = compiled({name: tensor.numpy() for name, tensor in inputs.items()})["last_hidden_state"]
    torch.testing.assert_close(torch.from_numpy(got), expected, atol=1e-5, rtol=0)


def test_same_bytes_twice(saved: Path, tiny_bert: Any, token_ids: Any, tmp_path: Path) -> None:
    again = OpenVINOExporter().export(tiny_bert, token_ids(1, 5), OpenVINOConfig(dynamic=True))
    again.save_pretrained(tmp_path / "again")
    assert _bytes(tmp_path / "again") == _bytes(saved)


def test_same_bytes_from_two_processes(tmp_path: Path) -> None:
    code = """
import sys, numpy, torch, openvino.opset15 as opset
from transformers import LlamaConfig, LlamaForCausalLM
from polyport_openvino import OpenVINOConfig, OpenVINOExporter
for _ in range(int(sys.argv[2])):  # move on whatever counts
    opset.relu(opset.parameter([1], numpy.float32))
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config).eval()
ids = torch.ones(2, 5, dtype=torch.int64)
inputs = {"input_ids": ids, "attention_mask": ids, "use_cache": False}
OpenVINOExporter().export(model, inputs, OpenVINOConfig(dynamic=True)).save_pretrained(sys.argv[1])
"""
    for number in ("0", "7"):
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / number), number], check=True, timeout=300,
            env={**os.environ, "PYTHONHASHSEED": number},
        )  # fmt: skip
    assert _bytes(tmp_path / "0") == _bytes(tmp_path / "7")


def test_saving_leaves_the_model_in_memory(exported: ExportedModel, tmp_path: Path) -> None:
    model = exported.program

    def seen() -> list[Any]:
        return [
            (
                node.get_friendly_name(),
                node.get_type_name(),
                [sorted(output.get_names()) for output in node.outputs()],
                sorted(node.get_rt_info().keys()),
            )
            for node in model.get_ordered_ops()
        ]

    before = seen(), model.get_friendly_name()
    exported.save_pretrained(tmp_path / "out")
    assert (seen(), model.get_friendly_name()) == before


def test_nothing_of_this_machine_and_nothing_left_over(saved: Path) -> None:
    content = b"".join(path.read_bytes() for path in saved.iterdir())
    for path in (Path(torch.__file__).parent.parent, Path(__file__).parents[2], Path.home()):
        assert os.fsencode(path) not in content


def test_tied_weights_are_written_once(tiny_llama: Any, token_ids: Any, tmp_path: Path) -> None:
    """Token embedding and output head are one matrix."""
    made = OpenVINOExporter().export(
        tiny_llama, {**token_ids(2, 5), "use_cache": False}, OpenVINOConfig(dynamic=True)
    )
    made.save_pretrained(tmp_path / "out")
    parameters = sum(p.numel() * 4 for p in {id(p): p for p in tiny_llama.parameters()}.values())
    assert (tmp_path / "out" / BIN).stat().st_size < parameters + tiny_llama.lm_head.weight.numel() * 2
    inputs = token_ids(3, 7)
    with torch.no_grad():
        expected = tiny_llama(**inputs).logits
    got = ExportedModel.from_pretrained(tmp_path / "out")(**inputs).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def _branching() -> ov.Model:
    """X + [1, 2] if that is positive on average, x * [3, 4] otherwise: weights inside branches."""
    inputs = infos(x=("float32", 2))

    def make(x: Any) -> Any:
        bodies = []
        for weight, combine in (([1, 2], opset.add), ([3, 4], opset.multiply)):
            inner = opset.parameter([2], np.float32)
            bodies.append(
                ov.Model([opset.result(combine(inner, opset.constant(np.float32(weight))))], [inner], "b")
            )
        positive = opset.greater(opset.reduce_sum(x, opset.constant([0])), opset.constant(np.float32(0)))
        choice = opset.if_op(positive.output(0))
        choice.set_then_body(bodies[0])
        choice.set_else_body(bodies[1])
        choice.set_input(x.output(0), bodies[0].get_parameters()[0], bodies[1].get_parameters()[0])
        chosen = choice.set_output(bodies[0].get_results()[0], bodies[1].get_results()[0])
        return opset.relu(chosen)

    return graph(inputs, ["y"], make)


@pytest.mark.parametrize("names", [("model",), ("first", "second")])
def test_branches(tmp_path: Path, names: tuple[str, ...]) -> None:
    written = []
    for index in range(2):
        made = export(**{name: _branching() for name in names}, shape=(2,))
        made.save_pretrained(tmp_path / str(index))
        written.append(_bytes(tmp_path / str(index)))
    assert written[0] == written[1]
    loaded = ExportedModel.from_pretrained(tmp_path / "0")
    for name in names:
        run = loaded.caller(name).runner
        assert run([torch.tensor([1.0, 2.0])])[0].tolist() == [2, 4]
        assert run([torch.tensor([-3.0, 2.0])])[0].tolist() == [0, 8]
        assert Counter(node.get_type_name() for node in operators(loaded[name].program))["Constant"] >= 4


def test_model_without_weights(tmp_path: Path) -> None:
    inputs = infos(x=("float32", 2))
    export(model=graph(inputs, ["y"], opset.relu), shape=(2,)).save_pretrained(tmp_path / "out")
    loaded = ExportedModel.from_pretrained(tmp_path / "out")
    assert loaded(x=torch.tensor([-1.0, 2.0]))["y"].tolist() == [0, 2]


# ── moved ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_moved_and_renamed(folder: Path, tmp_path: Path) -> None:
    folder.rename(tmp_path / "two")
    assert _sum(ExportedModel.from_pretrained(tmp_path / "two")) == EXPECTED


def test_saved_again_from_loaded(saved: Path, tmp_path: Path) -> None:
    ExportedModel.from_pretrained(saved).save_pretrained(tmp_path / "again")
    for name in (XML, BIN):
        assert (tmp_path / "again" / name).read_bytes() == (saved / name).read_bytes()


def test_saved_over_itself(folder: Path) -> None:
    before = _bytes(folder)
    loaded = ExportedModel.from_pretrained(folder)
    loaded.save_pretrained(folder)
    assert _bytes(folder) == before
    assert _sum(loaded) == EXPECTED
    loaded.save_pretrained(folder)
    assert _sum(ExportedModel.from_pretrained(folder)) == EXPECTED


def test_another_export_takes_its_place(folder: Path, tmp_path: Path) -> None:
    """One that is loaded stays what it was, whenever it is run or saved."""
    loaded = ExportedModel.from_pretrained(folder)
    running = ExportedModel.from_pretrained(folder)
    assert _sum(running) == EXPECTED
    export(model=sums(np.ones((64, 64), np.float32))).save_pretrained(folder)
    assert _sum(loaded) == _sum(running) == EXPECTED
    loaded.save_pretrained(tmp_path / "copy")
    assert _sum(ExportedModel.from_pretrained(tmp_path / "copy")) == EXPECTED
    assert _sum(ExportedModel.from_pretrained(folder)) == 64 * 64


def test_folder_that_disappears_after_loading(folder: Path) -> None:
    loaded = ExportedModel.from_pretrained(folder)
    shutil.rmtree(folder)
    assert _sum(loaded) == EXPECTED


def test_bare_program_under_another_name(tmp_path: Path) -> None:
    export(model=sums(WEIGHT)).save(tmp_path / "add.xml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["add.bin", "add.xml"]
    compiled = ov.Core().compile_model(str(tmp_path / "add.xml"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    assert float(compiled([np.zeros((64, 64), np.float32)])[0].astype(np.float64).sum()) == EXPECTED


@pytest.mark.parametrize("subfolder", ["", "openvino"])
def test_layout_of_the_hubs_cache(folder: Path, tmp_path: Path, subfolder: str) -> None:
    """Every file a read-only link into `blobs`; saved again and run from there."""
    repo = tmp_path / "models--me--it"
    snapshot = repo / "snapshots" / "c0ffee" / subfolder
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for index, path in enumerate(sorted(folder.iterdir())):
        blob = repo / "blobs" / str(index)
        shutil.copy(path, blob)
        blob.chmod(0o444)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    loaded = ExportedModel.from_pretrained(repo / "snapshots" / "c0ffee", subfolder=subfolder)
    assert _sum(loaded) == EXPECTED
    loaded.save_pretrained(tmp_path / "copy")
    assert _sum(ExportedModel.from_pretrained(tmp_path / "copy")) == EXPECTED


def test_another_tools_layout(tmp_path: Path) -> None:
    """Other port names, in the same order, and a `.bin` of the same stem."""
    inputs = infos(args_0=("float32", 64, 64))
    model = graph(inputs, ["output_0"], lambda x: opset.add(x, opset.constant(WEIGHT)))
    ov.save_model(model, tmp_path / XML)
    weights = load_model([tmp_path / XML, tmp_path / BIN])
    made = export(model=weights)
    torch.testing.assert_close(_sum(made), EXPECTED, atol=1, rtol=1e-3)  # saved in float16


# ── refused ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _files(folder: Path) -> list[Path]:
    return [folder / XML, folder / BIN]


def _laughs(text: str) -> str:
    entities = '<!ENTITY a0 "ha">' + "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 12))
    return text.replace("<net ", f"<!DOCTYPE net [{entities}]><net ", 1).replace(
        'name="model"', 'name="&a11;"'
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "", "is no XML"),
        (lambda text: "garbage", "is no XML"),
        (lambda text: text[: len(text) // 2], "is no XML"),
        (lambda text: text.replace("<layers>", "<layers>" * 300), "has elements inside 200 others"),
        (lambda text: "<html><body/></html>", "holds no graph"),
        (lambda text: "<net/>", "holds no graph"),
        (_laughs, "declares a document type"),
        (lambda text: text.replace("<net ", '<!DOCTYPE net SYSTEM "file:///etc/passwd"><net ', 1), "declares a document type"),
        (lambda text: text.replace("utf-8", "utf-16"), "is encoded in utf-16"),
        (lambda text: text.replace('offset="0"', 'offset="4"'), "outside its file of weights"),
        (lambda text: text.replace('offset="0"', 'offset="-1"'), "describes the weight .* wrongly"),
        (lambda text: text.replace('offset="0"', 'offset="four"'), "describes the weight .* wrongly"),
        (lambda text: text.replace('offset="0"', 'offset="18446744073709551615"'), "describes the weight .* wrongly"),
        (lambda text: text.replace('offset="0"', 'offset="9223372036854775807"'), "outside its file of weights"),
        (lambda text: text.replace('offset="0"', ""), "describes the weight .* wrongly"),
        (lambda text: text.replace('size="16384"', 'size="16388"'), "outside its file of weights"),
        (lambda text: text.replace('size="16384"', 'size="18446744073709551000"'), "describes the weight .* wrongly"),
        (lambda text: text.replace('size="16384"', 'size="16"'), "is no OpenVINO model"),
        (lambda text: text.replace('shape="64, 64" offset', 'shape="4294967296, 4294967296" offset'), "is no OpenVINO model"),
        (lambda text: text.replace('shape="64, 64" offset', 'shape="-1, 64" offset'), "is no OpenVINO model"),
        (lambda text: text.replace('element_type="f32" shape="64, 64" offset', 'element_type="string" shape="64, 64" offset'), "holds texts"),
        (lambda text: text.replace('type="Add"', 'type="Nothing"'), "is no OpenVINO model"),
        (lambda text: text.replace('type="Add" version="opset1"', 'type="Add" version="mine"'), "is no OpenVINO model"),
        (lambda text: text.replace('to-layer="2"', 'to-layer="77"'), "is no OpenVINO model"),
    ],
)  # fmt: skip
def test_hostile_graphs(folder: Path, change: Any, message: str) -> None:
    text = (folder / XML).read_text()
    changed = change(text)
    assert changed != text
    (folder / XML).write_text(changed)
    started = time.monotonic()
    with pytest.raises(ArtifactError, match=rf"{XML} .*{message}") as caught:
        load_model(_files(folder))
    assert time.monotonic() - started < 5
    assert ".cpp" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_inside_branches_are_looked_at(tmp_path: Path) -> None:
    save_models({"model": _branching()}, tmp_path)
    text = (tmp_path / XML).read_text()
    place = text.index('type="Const"', text.index("then_body"))
    (tmp_path / XML).write_text(text[:place] + text[place:].replace('offset="', 'offset="99', 1))
    with pytest.raises(ArtifactError, match="outside its file of weights"):
        load_model(_files(tmp_path))


def test_weights_that_are_not_listed(folder: Path) -> None:
    with pytest.raises(ArtifactError, match="outside its file of weights"):
        load_model([folder / XML])


def test_missing_weights(folder: Path) -> None:
    (folder / BIN).unlink()
    with pytest.raises(ArtifactError, match=rf"lacks the file '{BIN}'"):
        ExportedModel.from_pretrained(folder)


@pytest.mark.parametrize("name", [XML, BIN])
def test_truncated_export(folder: Path, name: str) -> None:
    os.truncate(folder / name, 200)
    with pytest.raises(ArtifactError, match=rf"{name} has 200 bytes"):
        ExportedModel.from_pretrained(folder)


def test_truncated_weights(folder: Path) -> None:
    os.truncate(folder / BIN, 200)
    with pytest.raises(ArtifactError, match="outside its file of weights"):
        load_model(_files(folder))


# ── described ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_description(exported: ExportedModel) -> None:
    described = describe_model(exported.program)
    assert described["operators"]["MatMul"] >= 12
    assert not {"Parameter", "Result", "Constant"} & set(described["operators"])
    assert described["precision"]["f32"] > 10_000
    assert described["weights"] > 10
    assert "variables" not in described


def test_description_of_variables() -> None:
    from openvino import op

    info = op.util.VariableInfo()
    info.data_shape, info.data_type, info.variable_id = ov.PartialShape([-1, 4]), ov.Type.f32, "state"
    variable = op.util.Variable(info)
    x = opset.parameter([1, 4], np.float32)
    total = opset.add(op.read_value(opset.constant(np.zeros((1, 4), np.float32)), variable), x)
    model = ov.Model([opset.result(total)], [op.assign(total, variable)], [x], "m")
    assert describe_model(model)["variables"] == {"state": "f32[?,4]"}
