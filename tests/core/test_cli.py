"""The command line without any real backend: help, exit codes, errors, JSON, and what it says to whom."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

import polyport
from polyport import ExportedModel
from polyport.cli import frame, render
from polyport.cli.app import app
from polyport.cli.progress import Stages
from polyport.cli.settings import build_configs
from polyport.errors import BackendNotInstalled, ConfigError, VerificationError

COMMANDS = ("export", "run", "generate", "verify", "inspect", "backends")
MakeExport = Callable[..., ExportedModel]
RUN = CliRunner()


def call(*arguments: str | Path) -> Any:
    return RUN.invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


@pytest.fixture
def saved(make_export: MakeExport, tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    make_export(data=True).save_pretrained(folder)
    return folder


# ── help, version, speed ────────────────────────────────────────────────────────────────────────────────────────────


def test_help_names_every_command() -> None:
    result = call("--help")
    assert result.exit_code == 0
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    assert "--debug" in result.stdout


def test_version() -> None:
    assert call("--version").stdout.strip() == f"polyport {polyport.__version__}"


def test_help_and_backends_import_neither_torch_nor_transformers() -> None:
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from polyport.cli.app import app\n"
        "for line in (['--help'], ['export', '--help'], ['backends'], ['export', './nowhere', '-o', 'x']):\n"
        "    CliRunner().invoke(app, line)\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_module_runs_as_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "polyport.cli", "export", "./nowhere"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "--output" in done.stderr


def test_a_reader_that_goes_away_is_no_error(saved: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "polyport.cli", "backends"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert "fault of polyport" not in done.stderr
    assert "Traceback" not in done.stderr


# ── backends ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_backends_are_listed(fake_backend: str) -> None:
    result = call("backends")
    assert result.exit_code == 0
    assert "polyport-fake 1.0" in result.stdout
    assert "trace, lower, save, load, run" in result.stdout


def test_backends_as_json(fake_backend: str) -> None:
    result = call("backends", "--json")
    found = {backend["format"]: backend for backend in json.loads(result.stdout)["backends"]}
    assert found["fake"]["distribution"] == "polyport-fake"
    assert found["fake"]["error"] is None
    assert "polyport_lower" in found["fake"]["hooks"]


def test_a_broken_backend_is_named_with_its_reason_and_hurts_nobody(install: Any, fake_backend: str) -> None:
    points = {"polyport.backends": {"broken": "polyport_broken"}}
    install(
        "polyport-broken", entry_points=points, modules={"polyport_broken": "raise RuntimeError('no engine')"}
    )
    points = {"polyport.backends": {"old": "polyport_old"}}
    install("polyport-old", entry_points=points, modules={"polyport_old": ""}, requires=["torch<1"])
    result = call("backends", "--json")
    found = {backend["format"]: backend for backend in json.loads(result.stdout)["backends"]}
    assert result.exit_code == 0
    assert "no engine" in found["broken"]["error"]
    assert "torch<1 is needed" in found["old"]["error"]
    assert found["fake"]["error"] is None
    assert "no engine" in call("backends").stdout


def test_without_backends_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyport.discovery.installed", lambda *_: [])
    result = call("backends")
    assert result.exit_code == 0
    assert "pip install polyport-" in result.stdout


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def outcome(
    error: BaseException | None = None, *, passed: bool = True, document: Any = None
) -> Callable[..., None]:
    def function(as_json: bool = False, debug: bool = False) -> frame.Outcome:
        print("noise on stdout")
        print("noise on stderr", file=sys.stderr)
        warnings.warn("noise of a library", FutureWarning, stacklevel=1)
        if error is not None:
            raise error
        return frame.Outcome(document or {"answer": 42}, lambda console: console.print("forty-two"), passed)

    return frame.command(function)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("Two\n words."), 2, "error: Two words."),
        (BackendNotInstalled("pip install it"), 2, "error: pip install it"),
        (VerificationError("They differ."), 1, "error: They differ."),
        (KeyboardInterrupt(), 130, "Interrupted"),
        (PermissionError(13, "Permission denied", "/out"), 2, "error: Permission denied: /out"),
        (MemoryError(), 2, "Memory ran out"),
        (ZeroDivisionError("by zero"), 2, "ZeroDivisionError: by zero This is a fault of polyport"),
    ],
)
def test_errors_are_one_paragraph_and_a_code(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: str
) -> None:
    with pytest.raises(typer.Exit) as raised:
        outcome(error)(as_json=False, debug=False)
    captured = capsys.readouterr()
    assert raised.value.exit_code == code
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_debug_shows_the_traceback_and_the_noise(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        outcome(ZeroDivisionError("by zero"))(as_json=False, debug=True)
    captured = capsys.readouterr()
    assert "Traceback" in captured.err
    assert "noise on stdout" in captured.err
    assert captured.out == ""


def test_an_error_as_json_is_one_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        outcome(ConfigError("No.", stage="lower", backend="fake"))(as_json=True, debug=False)
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document == {
        "error": {"type": "ConfigError", "message": "No.", "stage": "lower", "backend": "fake"}, "exit_code": 2
    }  # fmt: skip
    assert "error: No." in captured.err


def test_a_mismatch_is_code_1_after_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as raised:
        outcome(passed=False)(as_json=False, debug=False)
    assert raised.value.exit_code == 1
    assert capsys.readouterr().out == "forty-two\n"


def test_json_is_strict_and_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    outcome(document={"x": [float("nan"), 1.5], "path": Path("a")})(as_json=True, debug=False)
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"x": ["nan", 1.5], "path": "a", "passed": True, "warnings": []}
    assert captured.err == ""


def test_our_own_warnings_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    def function(as_json: bool = False, debug: bool = False) -> frame.Outcome:
        module = {"__name__": "polyport_any.runner"}
        for _ in range(2):
            exec("import warnings; warnings.warn('Mind\\nthis.', UserWarning)", module)
        return frame.Outcome({}, lambda console: None)

    frame.command(function)(as_json=True, debug=False)
    captured = capsys.readouterr()
    assert captured.err == "warning: Mind this.\n"
    assert json.loads(captured.out)["warnings"] == ["Mind this."]


def test_a_missing_argument_is_an_error() -> None:
    assert call("run").exit_code == 2


# ── configs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def configs(*formats: str, **options: Any) -> list[Any]:
    given = {"dynamic": True, "strict": False, "opset": None, "settings": [], **options}
    return build_configs(formats, **given)


def test_settings_reach_the_config(fake_backend: str) -> None:
    (config,) = configs(
        "fake", settings=["level=3", "fake.prefer_deferred_runtime_asserts_over_guards=true"], strict=True
    )
    assert config.to_dict()["level"] == 3
    assert config.prefer_deferred_runtime_asserts_over_guards
    assert config.dynamic
    assert config.strict


@pytest.mark.parametrize(
    ("formats", "options", "message"),
    [
        ((), {}, r"--to FORMAT \(installed: .*fake"),
        (("fake", "fake"), {}, "given twice"),
        (("fake",), {"settings": ["leve=3"]}, "Did you mean 'level'"),
        (("fake",), {"settings": ["level"]}, "no key=value"),
        (("fake",), {"settings": ["other.level=3"]}, "not exported to"),
        (("fake",), {"settings": ["level=high"]}, "level"),
        (("fake",), {"opset": 18}, "no option 'opset_version'"),
    ],
)
def test_impossible_settings_are_refused(
    fake_backend: str, formats: tuple[str, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        configs(*formats, **options)


def test_an_export_fails_before_any_work(fake_backend: str, saved: Path, tmp_path: Path) -> None:
    assert (
        "No installed plugin provides the format 'nope'"
        in call("export", "m", "--to", "nope", "-o", "x").stderr
    )
    assert "There is no folder './m'" in call("export", "./m", "--to", "fake", "-o", tmp_path / "x").stderr
    assert "is not empty" in call("export", "./m", "--to", "fake", "-o", saved).stderr
    assert "is a file" in call("export", "./m", "--to", "fake", "-o", saved / "export.json").stderr
    assert "is an export already" in call("export", saved, "--to", "fake", "-o", tmp_path / "x").stderr


# ── run and inspect ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_run_shows_every_output(saved: Path) -> None:
    result = call("run", saved, "--input", "x=[[1, 2, 3], [4, 5, 6]]")
    assert result.exit_code == 0, result.stderr
    assert "[2, 3]" in result.stdout
    assert "2.0000, 4.0000, 6.0000" in result.stdout
    assert "Running" in result.stderr


def test_run_as_json(saved: Path) -> None:
    result = call("run", saved, "--input", "x=[[1, 2, 3]]", "--json", "--quiet")
    document = json.loads(result.stdout)
    assert document["outputs"]["y"] == {"shape": [1, 3], "dtype": "float32", "first": [2.0, 4.0, 6.0]}
    assert document["format"] == "fake"
    assert result.stderr == ""


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_run_writes_outputs_and_reads_inputs(saved: Path, tmp_path: Path, suffix: str) -> None:
    np.savez(tmp_path / "in.npz", x=np.ones((2, 3), np.float32))
    result = call("run", saved, "--inputs", tmp_path / "in.npz", "-o", tmp_path / f"out{suffix}")
    assert result.exit_code == 0, result.stderr
    path = tmp_path / f"out{suffix}"
    read = load_file(path)["y"] if suffix == ".safetensors" else torch.from_numpy(np.load(path)["y"])
    assert torch.equal(read, torch.full((2, 3), 2.0))
    assert {entry.name for entry in tmp_path.glob(".*")} == set()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing to run the export on. Give --text"),
        (("--input", "x=[[1, 2]]"), "must be 3"),
        (("--input", "x=[1"), "not JSON"),
        (("--text", "hello"), "turns text into inputs"),
        (("--input", "x=[[1, 2, 3]]", "-o", "out.csv"), "not to out.csv"),
        (("--input", "x=[[1, 2, 3]]", "-o", "/no/where/out.npz"), "no folder /no/where"),
    ],
)
def test_run_refuses_in_words(saved: Path, arguments: tuple[str, ...], words: str) -> None:
    result = call("run", saved, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_an_unknown_input_is_announced(saved: Path) -> None:
    result = call("run", saved, "--input", "x=[[1, 2, 3]]", "--input", "z=[1]")
    assert result.exit_code == 0
    assert "warning: 'z' is no input of this export" in result.stderr


def test_inspect_shows_what_the_manifest_says(saved: Path) -> None:
    result = call("inspect", saved)
    assert result.exit_code == 0, result.stderr
    for words in ("model.fake (7 bytes)", "model.fake.data", "batch >= 1", "[batch, 3]"):
        assert words in result.stdout


def test_inspect_as_json(saved: Path) -> None:
    document = json.loads(call("inspect", saved, "--json").stdout)
    component = document["components"]["model"]
    assert [file["name"] for file in component["files"]] == ["model.fake", "model.fake.data"]
    assert component["metadata"]["inputs"][0]["shape"] == ["batch", 3]


def test_inspect_shows_where_operators_are_computed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = {
        "operators": {"Add": 3, "Mul": 1},
        "delegated": {"Accelerator": {"conv": 2, "relu": 5}, "Other": {}},
        "portable": {"sort": 1},
    }
    monkeypatch.setattr("polyport.session.Session.describe", lambda *_: described)
    shown = [" ".join(line.split()) for line in call("inspect", saved, "--ops", "1").stdout.splitlines()]
    assert "operators (4) Add 3, 1 more kinds" in shown
    assert "Accelerator (7) relu 5, 1 more kinds" in shown
    assert "not delegated (1) sort 1" in shown
    assert not any(line.startswith("Other") for line in shown)
    assert not {"sort 1", "relu 5"} & set(call("inspect", saved, "--ops", "0").stdout.splitlines())
    component = json.loads(call("inspect", saved, "--json").stdout)["components"]["model"]
    assert described.items() <= component.items()


def test_inspect_works_without_the_backend(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyport.discovery.installed", lambda *_: [])
    result = call("inspect", saved)
    assert result.exit_code == 0, result.stderr
    assert "[batch, 3]" in result.stdout
    assert "Operators are not known: No installed plugin" in result.stdout


def test_a_folder_of_exports_asks_which(saved: Path) -> None:
    for command in (("inspect",), ("run",), ("verify", "--model", "m")):
        result = call(command[0], saved.parent, *command[1:])
        assert result.exit_code == 2
        assert "holds several exports: choose one" in result.stderr
    assert call("inspect", saved.parent, "--subfolder", "saved").exit_code == 0
    assert "leads out" in call("inspect", saved, "--subfolder", "../saved/nothing").stderr


def test_a_damaged_export_is_one_error(saved: Path) -> None:
    (saved / "model.fake").write_bytes(b"changed")
    result = call("run", saved, "--input", "x=[[1, 2, 3]]")
    assert result.exit_code == 2
    assert "SHA-256" in result.stderr


# ── what people see ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_stages_are_announced_where_they_are_watched_and_not(tmp_path: Path) -> None:
    for terminal in (False, True):
        with (tmp_path / "out").open("w+") as file:
            stages = Stages(Console(file=file, force_terminal=terminal, width=80))
            with stages.stage("Doing this"):
                pass
            file.seek(0)
            assert "Doing this" in file.read()
        assert [name for name, _ in stages.seconds] == ["Doing this"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (999, "999 bytes"), (22_700_000, "22.7 MB"), (4e12, "4.0 TB")]
)
def test_sizes(count: float, text: str) -> None:
    assert render.size(count) == text


def test_axis_ranges() -> None:
    assert render.axis_range("batch", {"min": 1, "max": None}) == "batch >= 1"
    assert render.axis_range("sequence", {"min": 1, "max": 512}) == "1 <= sequence <= 512"


def test_a_comparison_shows_what_differs_and_why() -> None:
    good = {
        "name": "y",
        "max_abs": 1e-7,
        "max_rel": 0.0,
        "atol": 1e-4,
        "rtol": 1e-4,
        "passed": True,
        "reason": "",
    }
    bad = {**good, "max_abs": None, "max_rel": None, "passed": False, "reason": "other shape"}
    cases = [
        {"name": "sample", "sizes": {"batch": 1}, "outputs": [good, bad], "error": "", "passed": False},
        {"name": "batch x3", "sizes": {"batch": 3}, "outputs": [], "error": "it stopped", "passed": False},
    ]
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render.verification({"cases": cases, "passed": False}))
    shown = console.export_text()
    for words in ("batch=1", "1.0e-07", "other shape", "batch=3", "it stopped"):
        assert words in shown
    assert render.worst({"cases": cases}) == "2 cases, largest difference 1.0e-07"
