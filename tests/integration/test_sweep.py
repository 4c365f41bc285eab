"""The sweep tool, with a zoo of four cases: one that works, one that can't be built, one that never ends, one that talks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import sweep  # noqa: E402
import sweep_case  # noqa: E402
import sweep_generate  # noqa: E402
import sweep_table  # noqa: E402

VERSIONS = {"polyport": "0.1.0"}

ZOO = """
import time
from types import SimpleNamespace

import torch
import transformers

CASES = {name: SimpleNamespace(modality="text") for name in ("good", "broken", "endless", "talks")}


def names():
    return list(CASES)


def generative():
    return ["talks"]


def build(name):
    if name == "broken":
        raise ValueError("no such thing")
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, pad_token_id=0
    )
    return transformers.LlamaForCausalLM(config).eval(), None, {"input_ids": torch.tensor([[3, 4, 5]])}


def padded_prompts(name):
    ids = torch.tensor([[0, 0, 3, 4, 5], [6, 7, 3, 4, 5]])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def single(name):
    return {"input_ids": torch.ones(1, 5, dtype=torch.long)}


def build_all(name):
    if name == "broken":
        raise ValueError("no such thing")
    while name == "endless":
        time.process_time()
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    sample = {"input_ids": torch.ones(2, 5, dtype=torch.long)}
    other = {"input_ids": torch.ones(3, 7, dtype=torch.long)}
    return transformers.BertModel(config).eval(), sample, other, None
"""


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Runs the command with the fake zoo; returns its output. Results and tables are in `tmp_path`."""
    (tmp_path / "fake_zoo.py").write_text(ZOO)
    (tmp_path / "peer.csv").write_text(
        "case,format,result,where\ngood,dynamo,failed,export\nbroken,dynamo,ok,\n"
    )
    (tmp_path / "known.toml").write_text(
        '[[failure]]\ncase = "broken"\nformat = "dynamo"\nreason = "it is broken on purpose"\n'
    )

    def run(*arguments: str) -> str:
        command = [sys.executable, str(ROOT / "tools/sweep.py"), "--zoo", "fake_zoo", "--formats", "dynamo"]
        command += ["--results", str(tmp_path / "results.jsonl"), "--out", str(tmp_path / "page")]
        command += ["--peer", str(tmp_path / "peer.csv"), "--known-failures", str(tmp_path / "known.toml")]
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_sweep_reports_every_case_and_resumes(run: Any, tmp_path: Path) -> None:
    assert "2 cases, 2 to run" in run("--cases", "good", "broken")
    results = {r["case"]: r for r in sweep.read_results(tmp_path / "results.jsonl")}
    good, broken = results["good"], results["broken"]
    assert good["ok"]
    assert set(good["shapes"]) == {"sample", "other shape", "batch 1"}
    assert all(shape["ok"] and shape["max_rel"] < sweep_case.TOLERANCE for shape in good["shapes"].values())
    assert set(good["cpu_s"]) == {"capture", "trace", "lower", "save", "load", "run"}
    assert not broken["ok"]
    assert (broken["stage"], broken["error"]) == ("build", "ValueError: no such thing")

    page = (tmp_path / "page.md").read_text()
    assert "- `broken`, dynamo: it is broken on purpose" in page
    assert "- dynamo (1): `good`" in page
    assert len(json.loads((tmp_path / "page.json").read_text())["results"]) == 2

    assert "2 cases, 0 to run" in run("--cases", "good", "broken")
    assert "2 cases, 1 to run" in run("--cases", "good", "broken", "--failed")
    assert "1 cases, 1 to run" in run("--cases", "broken", "--fresh")
    assert len(sweep.read_results(tmp_path / "results.jsonl")) == 2


def test_a_sweep_of_what_generates(run: Any, tmp_path: Path) -> None:
    assert "2 cases, 2 to run" in run("--generate", "--cases", "talks", "broken")
    results = {(r["case"], r["task"]): r for r in sweep.read_results(tmp_path / "results.jsonl")}
    assert results.keys() == {("talks", "generate"), ("broken", "generate")}
    talks = results["talks", "generate"]
    assert talks["ok"], talks
    assert list(talks["shapes"]) == [
        "greedy, batch 1", "3 beams, batch 1", "greedy, padded batch", "3 beams, padded batch",
    ]  # fmt: skip
    assert talks["components"] == ["prefill", "decode"]
    assert set(talks["cpu_s"]) == {"capture", "trace", "lower", "save", "load", "run"}
    assert results["broken", "generate"]["stage"] == "build"
    page = (tmp_path / "page.md").read_text()
    assert "| **all** |  |  | 1 of 2 |" in page
    assert "- `broken`, dynamo: not looked into yet" in page


def test_tokens_must_be_the_same() -> None:
    expected = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert sweep_generate.compare(expected, expected.clone()) == {"ok": True}
    other = torch.tensor([[1, 2, 3], [4, 0, 6]])
    assert sweep_generate.compare(expected, other)["error"] == "another token at 1 of 3"
    assert sweep_generate.compare(expected, other[:1])["error"] == "[1, 3] tokens instead of [2, 3]"


def test_a_case_over_its_time_limit_ends_and_the_next_one_runs(run: Any, tmp_path: Path) -> None:
    run("--cases", "endless", "broken", "--time-limit", "1")
    endless, broken = sweep.read_results(tmp_path / "results.jsonl")
    assert not endless["ok"]
    assert (endless["stage"], endless["error"]) == ("build", "took more than 1 s of CPU time")
    assert broken["case"] == "broken"


def test_a_line_cut_short_is_left_out_and_the_newest_result_counts(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    old = {"case": "a", "format": "onnx", "versions": VERSIONS, "ok": False}
    file.write_text("\n".join([json.dumps(old), json.dumps({**old, "ok": True}), json.dumps(old)[:20]]))
    assert sweep.read_results(file) == [{**old, "ok": True}]


@pytest.mark.parametrize(
    ("got", "problem"),
    [
        ({"x": torch.tensor([1.0, 2.0])}, None),
        ({"x": torch.tensor([1.0, 2.0001])}, None),
        ({"x": torch.tensor([1.0, 2.1])}, "x: wrong values, off by 5.0e-02 of the largest"),
        ({"x": torch.tensor([1.0, float("nan")])}, "x: wrong values, off by inf of the largest"),
        ({"x": torch.tensor([[1.0, 2.0]])}, "x: torch.float32[1, 2] instead of torch.float32[2]"),
        (
            {"x": torch.tensor([1.0, 2.0]).double()},
            "x: torch.float64[2] instead of torch.float32[2]",
        ),
        ({"y": torch.tensor([1.0, 2.0])}, "doesn't return x"),
    ],
)
def test_compare_looks_at_names_shapes_dtypes_and_values(got: Any, problem: str | None) -> None:
    result = sweep_case.compare({"x": torch.tensor([1.0, 2.0])}, got)
    assert result.get("error") == problem
    assert result["ok"] is (problem is None)


def test_integers_must_be_equal() -> None:
    large = torch.tensor([10**9])
    assert sweep_case.compare({"ids": large}, {"ids": large.clone()})["ok"]
    assert not sweep_case.compare({"ids": large}, {"ids": large + 1})["ok"]


def test_the_tables_count_and_escape(tmp_path: Path) -> None:
    shapes = {"sample": {"ok": True, "max_abs": 0.0, "max_rel": 0.0}}
    seconds = {"capture": 1.0, "trace": 2.0, "lower": 3.0, "save": 0.5, "run": 9.0}
    common = {"versions": VERSIONS, "cpu_s": seconds}
    results = [
        {
            "case": "b",
            "format": "onnx",
            "ok": False,
            "stage": "lower",
            "error": "no | op",
            "detail": "long",
            **common,
        },
        {"case": "a", "format": "onnx", "ok": True, "shapes": shapes, **common},
    ]
    peer = tmp_path / "peer.csv"
    peer.write_text("case,format,result,where\na,onnx,ok,\nb,onnx,failed,run_other_shape\n")
    modalities = {"a": "text", "b": "vision"}
    sweep_table.write(tmp_path / "page", results, modalities, peer, tmp_path / "none.toml")
    lines = (tmp_path / "page.md").read_text().splitlines()
    assert "| **all** | 1 of 2 | 1 of 2 |" in lines
    assert "| a | text | ok | 6.5 | ok |" in lines
    assert "| b | vision | **failed**, lower: no \\| op |  | run other shape |" in lines
    assert "detail" not in (tmp_path / "page.json").read_text()


def test_what_generates_has_columns_of_its_own(tmp_path: Path) -> None:
    common = {"versions": VERSIONS, "cpu_s": {"trace": 2.0}, "shapes": {}, "format": "onnx"}
    results = [
        {"case": "a", "task": "forward", "ok": True, **common},
        {"case": "a", "task": "generate", "ok": True, **common},
        {"case": "b", "task": "generate", "ok": False, "stage": "trace", "error": "no", **common},
        {"case": "c", "ok": True, **common},
    ]
    known = tmp_path / "known.toml"
    known.write_text(
        '[[failure]]\ncase = "b"\nformat = "onnx"\ntask = "generate"\nreason = "it is shy"\n'
        '[[failure]]\ncase = "b"\nformat = "onnx"\nreason = "another one"\n'
    )
    modalities = {"a": "text", "b": "text", "c": "vision"}
    sweep_table.write(tmp_path / "page", results, modalities, tmp_path / "none.csv", known)
    lines = (tmp_path / "page.md").read_text().splitlines()
    assert "| text | 1 of 1 |  | 1 of 2 |" in lines
    assert "| vision | 1 of 1 |  |  |" in lines
    assert "| a | text | ok | 2.0 |  | ok | 2.0 |" in lines
    assert "| b | text |  |  |  | **failed**, trace: no |  |" in lines
    assert "| c | vision | ok | 2.0 |  |  |  |" in lines
    assert "- `b`, onnx: it is shy" in lines
    assert "another one" not in "\n".join(lines)
