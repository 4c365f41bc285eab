"""Exports of transformers' own exporters load here, and ours load there.

Those exporters are a program to us: they run in another process, and nothing of them is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import polyport
from polyport import DynamoConfig, ExportedModel, OnnxConfig, OpenVINOConfig, OpenVINOExporter
from polyport.errors import ArtifactError, InputError

CONFIGS = {"dynamo": DynamoConfig, "onnx": OnnxConfig, "openvino": OpenVINOConfig}
FORMATS = tuple(CONFIGS)
ATOL = 1e-5

#: Largest difference of our exports there. They leave the precision to OpenVINO, which takes bfloat16 where the CPU has it.
ATOL_THERE = {"dynamo": 1e-5, "onnx": 1e-5, "openvino": 5e-3}

#: Saves the model at argv[1] in every format below argv[2], with the inputs in argv[3].
EXPORT = """
import sys, torch, transformers
from transformers import exporters

source, target, inputs, kind = sys.argv[1:]
model = getattr(transformers, kind).from_pretrained(source).eval()
kwargs = torch.load(inputs, weights_only=False)
for name, exporter, config in (
    ("dynamo", exporters.DynamoExporter(), exporters.DynamoConfig(dynamic=True)),
    ("onnx", exporters.OnnxExporter(), exporters.OnnxConfig(dynamic=True)),
    ("openvino", exporters.OpenVINOExporter(), exporters.OpenVINOConfig(dynamic=True)),
):
    exporter.export(model, dict(kwargs), config=config).save_pretrained(f"{target}/{name}")
if "past_key_values" in kwargs:  # under its new name, they make it variables of the model
    kwargs["cache"] = kwargs.pop("past_key_values")
    exporter.export(model, dict(kwargs), config=config).save_pretrained(f"{target}/stateful")
"""

#: Runs the export at argv[1] with the inputs in argv[2], and saves what comes out to argv[3].
RUN = """
import sys, torch
from transformers import exporters

folder, inputs, outputs = sys.argv[1:]
export = exporters.ExportedModel.from_pretrained(folder, trust_remote_code=True)
result = export(**torch.load(inputs))
torch.save({"type": type(result).__name__, "last_hidden_state": result.last_hidden_state}, outputs)
"""


def _elsewhere(code: str, *arguments: Path | str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def _padded(batch: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch + length)
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, : length // 3] = 0
    return {"input_ids": torch.randint(64, (batch, length), generator=generator), "attention_mask": mask}


@pytest.fixture(scope="module")
def theirs(tiny_bert: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    tiny_bert.save_pretrained(folder / "model")
    torch.save(_padded(2, 5), folder / "inputs.pt")
    _elsewhere(EXPORT, folder / "model", folder, folder / "inputs.pt", "BertModel")
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_theirs_runs_here(theirs: Path, tiny_bert: Any, name: str) -> None:
    export = ExportedModel.from_pretrained(theirs / name, trust_remote_code=name == "dynamo")
    assert export.export_format == name
    assert export.dtype == torch.float32
    assert export.config.hidden_size == 32
    assert export["model"].metadata.input_names == ("input_ids", "attention_mask")
    for batch, length in ((2, 5), (3, 9)):
        inputs = _padded(batch, length)
        with torch.no_grad():
            expected = tiny_bert(**inputs)
        got = export(**inputs)
        assert type(got) is type(expected)
        torch.testing.assert_close(got.last_hidden_state, expected.last_hidden_state, atol=ATOL, rtol=0)
        torch.testing.assert_close(got.pooler_output, expected.pooler_output, atol=ATOL, rtol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_theirs_is_called_with_care(theirs: Path, name: str) -> None:
    """What their record lacks, such as names of axes, must not let a wrong call through to the runtime unexplained."""
    export = ExportedModel.from_pretrained(theirs / name, trust_remote_code=name == "dynamo")
    inputs = _padded(2, 5)
    assert export(**{key: value.int() for key, value in inputs.items()}).last_hidden_state.shape == (2, 5, 32)
    with pytest.raises(InputError, match="'attention_mask' is missing"):
        export(input_ids=inputs["input_ids"])
    with pytest.raises(InputError, match=r"'input_ids' has 1 axes \[5\], not 2"):
        export(input_ids=inputs["input_ids"][0], attention_mask=inputs["attention_mask"])


def test_theirs_holds_a_pickle(theirs: Path) -> None:
    with pytest.raises(
        ArtifactError, match=r"model\.pt2 holds pickled sample inputs, .* load it with trust_remote_code=True"
    ):
        ExportedModel.from_pretrained(theirs / "dynamo")


@pytest.mark.parametrize("name", FORMATS)
def test_theirs_becomes_ours_by_saving(theirs: Path, tiny_bert: Any, tmp_path: Path, name: str) -> None:
    """With sums of all files, and without the pickle."""
    ExportedModel.from_pretrained(theirs / name, trust_remote_code=name == "dynamo").save_pretrained(
        tmp_path / "ours"
    )
    inputs = _padded(3, 4)
    with torch.no_grad():
        expected = tiny_bert(**inputs)
    got = ExportedModel.from_pretrained(tmp_path / "ours")(**inputs)
    torch.testing.assert_close(got.last_hidden_state, expected.last_hidden_state, atol=ATOL, rtol=0)


@pytest.fixture(scope="module")
def ours(tiny_bert: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours")
    configs = [config(dynamic=True) for config in CONFIGS.values()]
    for name, export in polyport.export(tiny_bert, _padded(1, 4), configs).items():
        export.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_ours_runs_there(ours: Path, tiny_bert: Any, tmp_path: Path, name: str) -> None:
    inputs = _padded(3, 9)
    torch.save(inputs, tmp_path / "inputs.pt")
    _elsewhere(RUN, ours / name, tmp_path / "inputs.pt", tmp_path / "outputs.pt")
    got = torch.load(tmp_path / "outputs.pt")
    with torch.no_grad():
        expected = tiny_bert(**inputs)
    assert got["type"] == type(expected).__name__
    torch.testing.assert_close(
        got["last_hidden_state"], expected.last_hidden_state, atol=ATOL_THERE[name], rtol=0
    )


@pytest.mark.slow
def test_theirs_with_a_cache(tiny_llama: Any, tmp_path: Path) -> None:
    """A cache goes in and comes out, in the order that they flattened it in."""
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])

    def past() -> Any:
        with torch.no_grad():
            return tiny_llama(ids[:, :3], use_cache=True).past_key_values

    tiny_llama.save_pretrained(tmp_path / "model")
    inputs = {"input_ids": ids[:, 3:], "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])}
    torch.save({**inputs, "past_key_values": past()}, tmp_path / "inputs.pt")
    _elsewhere(EXPORT, tmp_path / "model", tmp_path, tmp_path / "inputs.pt", "LlamaForCausalLM")
    with torch.no_grad():
        expected = tiny_llama(**inputs, past_key_values=past())
    for name in FORMATS:
        export = ExportedModel.from_pretrained(tmp_path / name, trust_remote_code=name == "dynamo")
        (kwarg,) = {info.split(".")[0] for info in export["model"].metadata.input_names} - set(inputs)
        got = export(**inputs, **{kwarg: past()})
        torch.testing.assert_close(got.logits, expected.logits, atol=ATOL, rtol=0)
        for mine, other in zip(got.past_key_values.layers, expected.past_key_values.layers, strict=True):
            torch.testing.assert_close(mine.keys, other.keys, atol=ATOL, rtol=0)
            torch.testing.assert_close(mine.values, other.values, atol=ATOL, rtol=0)
    # what became variables there is not in its record, which names inputs that the graph hasn't
    stateful = ExportedModel.from_pretrained(tmp_path / "stateful")
    with pytest.raises(
        ArtifactError,
        match="The graph takes input_ids, attention_mask, beam_idx, the export's metadata names",
    ):
        stateful(**inputs, cache=past())


#: As RUN, with a cache among the inputs. Where the call fails, saves the name of the error.
RUN_WITH_CACHE = """
import sys, torch
from transformers import exporters

inputs, *folders = sys.argv[1:]
for folder in folders:
    export = exporters.ExportedModel.from_pretrained(folder, trust_remote_code=True)
    try:
        result = export(**torch.load(inputs, weights_only=False))
        found = {"logits": result.logits, "length": result.cache.get_seq_length()}
    except Exception as error:
        found = {"error": type(error).__name__}
    torch.save(found, folder + "/found.pt")
"""


@pytest.mark.slow
def test_ours_with_a_cache_runs_there(tiny_llama: Any, tmp_path: Path) -> None:
    """Where it goes in and comes out. Variables make them miss outputs, those of their own exports too."""
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])

    def inputs() -> dict[str, Any]:
        with torch.no_grad():
            cache = tiny_llama(ids[:, :3], use_cache=True).past_key_values
        return {
            "input_ids": ids[:, 3:],
            "attention_mask": torch.ones(2, 4, dtype=torch.int64),
            "cache": cache,
        }

    exporter, folders = OpenVINOExporter(), [tmp_path / "stateless", tmp_path / "stateful"]
    for folder in folders:
        config = OpenVINOConfig(dynamic=True, stateful=folder.name == "stateful")
        exporter.export(tiny_llama, inputs(), config).save_pretrained(folder)
    torch.save(inputs(), tmp_path / "inputs.pt")
    _elsewhere(RUN_WITH_CACHE, tmp_path / "inputs.pt", *folders)
    stateless, stateful = (torch.load(folder / "found.pt") for folder in folders)
    with torch.no_grad():
        expected = tiny_llama(**inputs()).logits
    torch.testing.assert_close(stateless["logits"], expected, atol=ATOL_THERE["openvino"], rtol=0)
    assert stateless["length"] == 4
    assert stateful == {"error": "StopIteration"}
