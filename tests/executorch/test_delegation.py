"""What is delegated, what is left, and what can't be run at all."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.runtime import BackendRegistry, Method
from transformers import PreTrainedConfig, PreTrainedModel
from typer.testing import CliRunner

import polyport
from polyport import ExportedModel
from polyport.cli.app import app
from polyport.errors import ExportError
from polyport_dynamo import DynamoConfig
from polyport_executorch import ExecutorchConfig, ExecutorchExporter
from polyport_executorch.delegation import REPORT


class TinyConfig(PreTrainedConfig):
    model_type = "tiny_without_kernel"


class Tiny(PreTrainedModel):
    """A layer, and then an operator that no kernel computes."""

    config_class = TinyConfig

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.layer = torch.nn.Linear(4, 4)
        self.post_init()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.extra(self.layer(x))

    def extra(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Inverse(Tiny):
    def extra(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x)


class Spectrum(Tiny):
    def extra(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x).abs()


class HalfSpectrum(Tiny):
    def extra(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x).real


class EigenValues(Tiny):
    def extra(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvalsh(x @ x.mT)


def tiny(cls: type[Tiny]) -> Tiny:
    torch.manual_seed(0)
    return cls(TinyConfig()).eval()


# ── the report ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_report_of_a_model(exported: ExportedModel, tiny_bert: Any) -> None:
    report = exported["model"].metadata.backend[REPORT]
    assert set(report) == {"delegated", "portable"}
    assert list(report["delegated"]) == ["XnnpackBackend"]
    taken, left = report["delegated"]["XnnpackBackend"], report["portable"]
    layers = sum(isinstance(module, torch.nn.Linear) for module in tiny_bert.modules())
    assert taken["aten::linear"] >= layers
    assert taken["aten::_softmax"] == 2  # one per layer
    assert taken["delegates"] >= 1
    assert left["aten::embedding.out"] == 3  # words, positions, types
    assert not any("linear" in name or "addmm" in name for name in left)
    assert all(isinstance(count, int) and count > 0 for count in (*taken.values(), *left.values()))


def test_report_counts_what_the_program_calls(exported: ExportedModel) -> None:
    report = exported["model"].metadata.backend[REPORT]
    (plan,) = exported.program.executorch_program.execution_plan
    kinds = [type(step.instr_args).__name__ for chain in plan.chains for step in chain.instructions]
    assert sum(report["portable"].values()) == kinds.count("KernelCall")
    assert report["delegated"]["XnnpackBackend"]["delegates"] == kinds.count("DelegateCall")


def test_report_is_saved(exported: ExportedModel, saved: Path) -> None:
    loaded = ExportedModel.from_pretrained(saved)
    assert loaded["model"].metadata.backend == exported["model"].metadata.backend


def test_inspect(exported: ExportedModel, saved: Path) -> None:
    report = exported["model"].metadata.backend[REPORT]
    run = CliRunner()
    shown = run.invoke(app, ["inspect", str(saved)], env={"COLUMNS": "160"})
    assert shown.exit_code == 0
    for text in ("executorch", "model.pte", "XnnpackBackend", "aten::linear", "aten::embedding.out"):
        assert text in shown.stdout, text
    found = run.invoke(app, ["inspect", str(saved), "--json"])
    assert found.exit_code == 0
    component = json.loads(found.stdout)["components"]["model"]
    assert component["metadata"]["backend"][REPORT] == report
    assert component["delegated"] == report["delegated"]
    assert component["portable"] == report["portable"]


# ── no kernel ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("cls", "operator"),
    [(Inverse, "linalg_inv_ex"), (EigenValues, "_linalg_eigh")],
    ids=["inv", "eigvalsh"],
)
def test_operator_without_a_kernel(cls: type[Tiny], operator: str) -> None:
    """At the export, not at the first call on the device."""
    model, x = tiny(cls), torch.randn(4, 4)
    with pytest.raises(ExportError, match=operator) as caught:
        ExecutorchExporter().export(model, {"x": x})
    assert caught.value.backend == "executorch"
    assert "Traceback" not in str(caught.value)
    assert "\n" not in str(caught.value).strip()


def test_kernel_that_no_delegate_has() -> None:
    """Complex numbers inside of a program: left to ExecuTorch's own kernels, which have these operators."""
    model, x = tiny(HalfSpectrum), torch.randn(4, 4)
    exported = ExecutorchExporter().export(model, {"x": x})
    assert any("_fft_" in name for name in exported["model"].metadata.backend[REPORT]["portable"])
    with torch.no_grad():
        torch.testing.assert_close(exported(x=x), model(x), atol=1e-5, rtol=1e-5)


def test_kernel_that_refuses_its_arguments() -> None:
    """There is a kernel, but not for this: it would only say so at the first call."""
    model, x = tiny(Spectrum), torch.randn(4, 4)
    with pytest.raises(
        ExportError, match=r"kernel of aten::_fft_r2c\.out .* onesided=False is not"
    ) as caught:
        ExecutorchExporter().export(model, {"x": x})
    assert caught.value.backend == "executorch"


def test_export_keeps_nothing_of_the_trial(
    small: Any, token_ids: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program runs once on the sample: no file stays, and the sample is as it was."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    inputs = token_ids(2, 5)
    given = copy.deepcopy(inputs)
    ran = []
    execute = Method.execute
    monkeypatch.setattr(Method, "execute", lambda self, x: (ran.append(len(x)), execute(self, x))[1])
    ExecutorchExporter().export(small, inputs, ExecutorchConfig(dynamic=True))
    assert ran == [2]
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(inputs[name], given[name]) for name in given)


def test_program_for_another_runtime_is_not_run(
    small: Any, token_ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its delegates compute can't be computed here."""
    monkeypatch.setattr(BackendRegistry, "is_available", lambda *_: False)
    monkeypatch.setattr(Method, "execute", lambda *_: pytest.fail("was run"))
    exported = ExecutorchExporter().export(small, token_ids(2, 5), ExecutorchConfig(dynamic=True))
    assert exported["model"].metadata.backend[REPORT]["delegated"]


def test_no_room_to_try_the_program(
    small: Any, token_ids: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is exported all the same, and the log says what was not done."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("polyport_executorch.artifact.write_program", full)
    ExecutorchExporter().export(small, token_ids(2, 5), ExecutorchConfig(dynamic=True))
    assert "not tried out: [Errno 28] No space left" in caplog.text


def test_failed_export_leaves_the_model_as_it_was() -> None:
    model, x = tiny(EigenValues), torch.randn(4, 4)
    before, given = copy.deepcopy(model.state_dict()), x.clone()
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    keys = set(vars(model))
    with torch.no_grad():
        expected = model(x)
    with pytest.raises(ExportError, match="_linalg_eigh"):
        ExecutorchExporter().export(model, {"x": x})
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places
    torch.testing.assert_close(model.state_dict(), before, atol=0, rtol=0)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    assert set(vars(model)) == keys
    assert torch.equal(x, given)
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_other_formats_after_a_failed_export() -> None:
    """The caller's trace isn't the worse for it."""
    model, x = tiny(EigenValues), torch.randn(4, 4)
    with pytest.raises(ExportError, match="_linalg_eigh"):
        polyport.export(model, {"x": x}, [ExecutorchConfig(), DynamoConfig()])
    exported = polyport.export(model, {"x": x}, [DynamoConfig()])["dynamo"]
    with torch.no_grad():
        torch.testing.assert_close(exported(x=x), model(x), atol=1e-5, rtol=1e-5)


def test_failed_export_writes_nothing(
    tiny_bert: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command line, onto an export that is there: it stays, whole, and nothing lies beside it."""
    tiny_bert.save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    out.mkdir()
    (out / "export.json").write_text("what was there")

    def refuse(manager: Any) -> None:
        raise ExportError("no kernel for this", stage="lower", backend="executorch")

    monkeypatch.setattr("polyport_executorch.delegation.refuse_missing", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    done = CliRunner().invoke(
        app,
        ["export", str(tmp_path / "model"), "--to", "executorch", "-o", str(out), "--force"],
        env={"COLUMNS": "160"},
    )
    assert done.exit_code != 0
    assert "no kernel for this" in done.output
    assert "Traceback" not in done.output
    assert [path.name for path in out.iterdir()] == ["export.json"]
    assert (out / "export.json").read_text() == "what was there"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "temporary"]
    assert not list((tmp_path / "temporary").rglob("*.pte"))
