"""The command line from a model on disk to verified exports in several formats, and back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from typer.testing import CliRunner

from polyport.cli.app import app

FORMATS = ("onnx", "openvino", "dynamo")
CONFIG = {
    "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 32, "num_labels": 3, "id2label": {0: "dull", 1: "fair", 2: "fine"},
    "label2id": {"dull": 0, "fair": 1, "fine": 2},
}  # fmt: skip
RUN = CliRunner()


def call(*arguments: str | Path) -> Any:
    return RUN.invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


def save_bert(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    transformers.BertForSequenceClassification(transformers.BertConfig(**CONFIG)).save_pretrained(folder)
    vocabulary = {
        w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", ",", "world", "!", "this"])
    }
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]"
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("models") / "bert", seed=0)


@pytest.fixture(scope="module")
def export(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("exports") / "bert"
    result = call(
        "export", model, *(word for name in FORMATS for word in ("--to", name)), "-o", out, "--json"
    )
    assert result.exit_code == 0, result.stderr
    return out, result


def test_one_trace_serves_all_formats_and_each_is_proved(export: tuple[Path, Any]) -> None:
    out, result = export
    document = json.loads(result.stdout)
    assert document["architecture"] == "BertForSequenceClassification"
    assert document["task"] == "text-classification"
    assert [stage["stage"] for stage in document["stages"]].count("Tracing the model") == 1
    assert [one["format"] for one in document["exports"]] == list(FORMATS)
    for one in document["exports"]:
        assert one["verification"]["passed"]
        assert len(one["verification"]["cases"]) >= 4
        assert one["directory"] == str(out / one["format"])
        assert {"batch", "sequence"} <= one["axes"].keys()
        assert one["bytes"] == sum(
            (out / one["format"] / file["name"]).stat().st_size for file in one["files"]
        )
        assert (out / one["format"] / "tokenizer.json").is_file()


def test_libraries_are_not_heard(export: tuple[Path, Any]) -> None:
    stages = {stage["stage"] for stage in json.loads(export[1].stdout)["stages"]}
    for line in export[1].stderr.splitlines():
        assert any(line.startswith(stage) for stage in stages), line


@pytest.mark.parametrize("name", FORMATS)
def test_an_export_runs_on_text_with_the_tokenizer_beside_it(
    export: tuple[Path, Any], model: Path, name: str
) -> None:
    result = call("run", export[0] / name, "--text", "hello world", "--text", "hello", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    original = transformers.BertForSequenceClassification.from_pretrained(model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    inputs = tokenizer(
        ["hello world", "hello"], padding=True, return_tensors="pt", return_token_type_ids=False
    )
    with torch.no_grad():
        logits = original(**inputs).logits
    assert document["outputs"]["logits"]["shape"] == [2, 3]
    first = torch.tensor(document["outputs"]["logits"]["first"])
    torch.testing.assert_close(first, logits.flatten(), atol=1e-5, rtol=1e-5)
    best = [row[0]["label"] for row in document["labels"]]
    assert best == [original.config.id2label[i] for i in logits.argmax(-1).tolist()]


@pytest.mark.parametrize("name", FORMATS)
def test_verify_says_same_or_different(
    export: tuple[Path, Any], model: Path, tmp_path: Path, name: str
) -> None:
    same = call("verify", export[0] / name, "--model", model)
    assert same.exit_code == 0, same.stderr
    assert "Same:" in same.stdout
    other = call("verify", export[0] / name, "--model", save_bert(tmp_path / "other", seed=1))
    assert other.exit_code == 1
    assert "DIFFERS" in other.stdout
    strict = call("verify", export[0] / name, "--model", model, "--atol", "1", "--rtol", "0", "--json")
    assert json.loads(strict.stdout)["passed"]


@pytest.mark.parametrize("name", FORMATS)
def test_inspect_counts_operators(export: tuple[Path, Any], name: str) -> None:
    component = json.loads(call("inspect", export[0] / name, "--json").stdout)["components"]["model"]
    assert sum(component["operators"].values()) > 10
    shown = call("inspect", export[0] / name, "--ops", "2").stdout
    assert "[batch, sequence]" in shown
    assert "more kinds" in shown


def test_one_format_goes_to_the_folder_itself_and_is_not_overwritten(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = (
        "export",
        model,
        "--to",
        "onnx",
        "-o",
        out,
        "--no-verify",
        "--static",
        "--input",
        "input_ids=[[4, 6, 7]]",
    )
    assert call(*arguments).exit_code == 0
    assert (out / "export.json").is_file()
    (out / "mine.txt").write_text("keep")
    refused = call(*arguments)
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    forced = call(*arguments, "--force")
    assert forced.exit_code == 0
    assert "not verified" in forced.stdout
    assert "none varies" in forced.stdout
    assert (out / "mine.txt").read_text() == "keep"


def test_a_mismatch_is_exit_code_1_and_shows_where(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyport.verify.TOLERANCES", {torch.float32: (0.0, 0.0)})
    result = call("export", model, "--to", "onnx", "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert "DIFFERS" in result.stdout
    assert "logits" in result.stdout


def test_ctrl_c_leaves_nothing_half_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("polyport.manifest.Manifest.write", interrupted)
    result = call("export", model, "--to", "onnx", "-o", tmp_path / "out")
    assert result.exit_code == 130
    assert "Interrupted" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_another_head_and_another_dtype(model: Path, tmp_path: Path) -> None:
    arguments = ("--task", "feature-extraction", "--dtype", "bfloat16", "--json")
    result = call("export", model, "--to", "dynamo", "-o", tmp_path / "out", *arguments)
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["architecture"] == "BertModel"
    assert {info["dtype"] for info in document["exports"][0]["outputs"]} == {"bfloat16"}
    written = call("run", tmp_path / "out", "--text", "hello", "-o", tmp_path / "o.npz")
    assert "numpy has no bfloat16" in written.stderr
    assert call("run", tmp_path / "out", "--text", "hello", "-o", tmp_path / "o.safetensors").exit_code == 0
    assert load_file(tmp_path / "o.safetensors")["last_hidden_state"].dtype == torch.bfloat16


def test_backend_options_are_set_by_name(model: Path, tmp_path: Path) -> None:
    result = call("export", model, "--to", "onnx", "-o", tmp_path / "out", "--opset", "20", "--no-verify")
    assert result.exit_code == 0, result.stderr
    metadata = json.loads(call("inspect", tmp_path / "out", "--json").stdout)["components"]["model"][
        "metadata"
    ]
    assert metadata["export_config"]["opset_version"] == 20


def test_an_input_the_model_does_not_take_is_refused(model: Path, tmp_path: Path) -> None:
    result = call("export", model, "--to", "onnx", "-o", tmp_path / "out", "--input", "pixels=[[1]]")
    assert result.exit_code == 2
    assert "takes no input 'pixels'. It takes: input_ids" in result.stderr


def test_an_encoder_decoder_is_run_without_naming_decoder_inputs(tmp_path: Path) -> None:
    config = transformers.T5Config(
        vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    exported = call("export", tmp_path / "t5", "--to", "onnx", "-o", tmp_path / "out", "--json")
    assert exported.exit_code == 0, exported.stderr
    result = call("run", tmp_path / "out", "--input", "input_ids=[[5, 6, 7], [5, 6, 1]]", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["outputs"]["logits"]["shape"] == [2, 1, 20]


def test_as_a_process(export: tuple[Path, Any]) -> None:
    command = [
        sys.executable,
        "-m",
        "polyport.cli",
        "run",
        str(export[0] / "onnx"),
        "--text",
        "hello",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["outputs"]["logits"]["shape"] == [1, 3]
