"""Files: what is written, what may be moved, and what is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from executorch.runtime import Runtime
from typer.testing import CliRunner

from polyport import ExportedModel
from polyport.cli.app import app
from polyport.errors import ArtifactError
from polyport_executorch import ExecutorchConfig, ExecutorchExporter
from polyport_executorch.artifact import load_program

PTE = "model.pte"


def digest(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def fresh(code: str, *arguments: Any, **environment: str) -> str:
    """Run code in a process that knows nothing of this one."""
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *map(str, arguments)],
        capture_output=True, text=True, timeout=300, env=variables, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def assert_right(exported: ExportedModel, tiny_bert: Any, token_ids: Any) -> None:
    inputs = token_ids(3, 7)
    with torch.no_grad():
        expected = tiny_bert(**inputs).last_hidden_state
    torch.testing.assert_close(exported(**inputs).last_hidden_state, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def other(small: Any, token_ids: Any) -> ExportedModel:
    """An export of another model, with one output less."""
    return ExecutorchExporter().export(small, token_ids(1, 5), ExecutorchConfig(dynamic=True))


# ── written ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_file(saved: Path, tiny_bert: Any) -> None:
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "export.json", PTE]
    weights = sum(p.numel() * 4 for p in tiny_bert.parameters())
    assert weights < (saved / PTE).stat().st_size < 2 * weights


def test_in_a_fresh_process(saved: Path, tiny_bert: Any, token_ids: Any, tmp_path: Path) -> None:
    cases = [token_ids(batch, length) for batch, length in ((1, 5), (3, 5), (1, 2), (2, 33))]
    torch.save(cases, tmp_path / "cases.pt")
    moved = shutil.copytree(saved, tmp_path / "moved")
    code = """
import sys, torch
from polyport import ExportedModel
export = ExportedModel.from_pretrained(sys.argv[1])
cases = torch.load(sys.argv[2] + "/cases.pt")
torch.save([export(**case).last_hidden_state for case in cases], sys.argv[2] + "/got.pt")
"""
    fresh(code, moved, tmp_path)
    for case, got in zip(cases, torch.load(tmp_path / "got.pt"), strict=True):
        with torch.no_grad():
            expected = tiny_bert(**case).last_hidden_state
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_executorch_reads_it_alone(saved: Path, tiny_bert: Any, token_ids: Any) -> None:
    method = Runtime.get().load_program(saved / PTE).load_method("forward")
    inputs = token_ids(3, 4)
    with torch.no_grad():
        expected = tiny_bert(**inputs).last_hidden_state
    got = method.execute([inputs["input_ids"], inputs["attention_mask"]])[0]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_same_bytes_from_two_saves(exported: ExportedModel, saved: Path, tmp_path: Path) -> None:
    exported(input_ids=torch.ones(1, 3, dtype=torch.int64))  # running it in between doesn't matter
    exported.save_pretrained(tmp_path / "again")
    assert digest(tmp_path / "again") == digest(saved)


def test_same_bytes_from_another_process(other: ExportedModel, tmp_path: Path) -> None:
    other.save_pretrained(tmp_path / "here")
    code = """
import sys, torch
from transformers import BertConfig, BertModel
from polyport_executorch import ExecutorchConfig, ExecutorchExporter
torch.set_num_threads(1)
torch.manual_seed(0)
config = BertConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                    max_position_embeddings=48)
model = BertModel(config, add_pooling_layer=False).eval()
generator = torch.Generator().manual_seed(1005)
inputs = {"input_ids": torch.randint(64, (1, 5), generator=generator),
          "attention_mask": torch.ones(1, 5, dtype=torch.int64)}
ExecutorchExporter().export(model, inputs, ExecutorchConfig(dynamic=True)).save_pretrained(sys.argv[1])
"""
    fresh(code, tmp_path / "there", PYTHONHASHSEED="7")
    assert digest(tmp_path / "there") == digest(tmp_path / "here")


def test_nothing_of_this_machine(saved: Path) -> None:
    content = b"".join(path.read_bytes() for path in saved.iterdir())
    for path in (Path(torch.__file__).parent.parent, Path(__file__).parents[2], Path.home()):
        assert os.fsencode(path) not in content


def test_no_temporary_file_is_left(
    small: Any, other: ExportedModel, token_ids: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    fresh_one = ExportedModel("executorch", other.components)
    got = fresh_one(**token_ids(2, 5)).last_hidden_state
    with torch.no_grad():
        torch.testing.assert_close(got, small(**token_ids(2, 5)).last_hidden_state, atol=1e-5, rtol=1e-5)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_bare_program(
    exported: ExportedModel, saved: Path, tiny_bert: Any, token_ids: Any, tmp_path: Path
) -> None:
    exported.save(tmp_path / "phone.pte")
    assert [path.name for path in tmp_path.iterdir()] == ["phone.pte"]
    assert (tmp_path / "phone.pte").read_bytes() == (saved / PTE).read_bytes()
    inputs = token_ids(2, 9)
    method = Runtime.get().load_program(tmp_path / "phone.pte").load_method("forward")
    with torch.no_grad():
        expected = tiny_bert(**inputs).last_hidden_state
    torch.testing.assert_close(method.execute(list(inputs.values()))[0], expected, atol=1e-5, rtol=1e-5)


def test_bare_program_of_a_loaded_export(loaded: ExportedModel, saved: Path, tmp_path: Path) -> None:
    loaded.save(tmp_path / "phone.pte")
    assert (tmp_path / "phone.pte").read_bytes() == (saved / PTE).read_bytes()


# ── moved and replaced ──────────────────────────────────────────────────────────────────────────────────────────────


def test_saved_again_from_loaded(loaded: ExportedModel, saved: Path, tmp_path: Path) -> None:
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / PTE).read_bytes() == (saved / PTE).read_bytes()


def test_saved_over_itself(folder: Path, tiny_bert: Any, token_ids: Any) -> None:
    before = digest(folder)
    loaded = ExportedModel.from_pretrained(folder)
    for _ in range(2):
        loaded.save_pretrained(folder)
        assert digest(folder) == before
        assert_right(loaded, tiny_bert, token_ids)
    assert_right(ExportedModel.from_pretrained(folder), tiny_bert, token_ids)


def test_another_export_takes_its_place(
    folder: Path, other: ExportedModel, tiny_bert: Any, small: Any, token_ids: Any, tmp_path: Path
) -> None:
    """One that is loaded stays what it was, whenever it is run or saved."""
    loaded = ExportedModel.from_pretrained(folder)
    running = ExportedModel.from_pretrained(folder)
    assert_right(running, tiny_bert, token_ids)
    other.save_pretrained(folder)
    assert_right(loaded, tiny_bert, token_ids)
    assert_right(running, tiny_bert, token_ids)
    loaded.save_pretrained(tmp_path / "kept")
    assert_right(ExportedModel.from_pretrained(tmp_path / "kept"), tiny_bert, token_ids)
    assert_right(ExportedModel.from_pretrained(folder), small, token_ids)


def test_folder_that_disappears(folder: Path, tiny_bert: Any, token_ids: Any, tmp_path: Path) -> None:
    loaded = ExportedModel.from_pretrained(folder)
    shutil.rmtree(folder)
    assert_right(loaded, tiny_bert, token_ids)
    loaded.save_pretrained(tmp_path / "again")
    assert_right(ExportedModel.from_pretrained(tmp_path / "again"), tiny_bert, token_ids)


def test_save_that_fails_leaves_the_old_one(
    folder: Path, other: ExportedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest(folder)

    def full(program: Any, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("polyport_executorch.artifact.write_program", full)
    with pytest.raises(OSError, match="No space left"):
        other.save_pretrained(folder)
    with pytest.raises(OSError, match="No space left"):
        other.save(tmp_path / "phone.pte")
    assert digest(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


# ── refused ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def damaged(content: bytes, how: str) -> bytes:
    return {
        "empty": b"",
        "short": content[:6],
        "text": b"no program at all",
        "another format": b"PK\x03\x04" + bytes(100),
        "head alone": content[:8] + bytes(100),
        "noise after the head": content[:8] + bytes(range(256)) * 40,
        "half": content[: len(content) // 2],
        "without its end": content[:-4096],
        "without its start": content[4096:],
    }[how]


DAMAGES = (
    "empty", "short", "text", "another format", "head alone", "noise after the head", "half", "without its end",
    "without its start",
)  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_program(saved: Path, tmp_path: Path, how: str) -> None:
    """In a process of its own: a fault that ends it is no error that somebody could catch."""
    (tmp_path / "program.pte").write_bytes(damaged((saved / PTE).read_bytes(), how))
    code = """
import sys
from pathlib import Path
from polyport.errors import ArtifactError
from polyport_executorch.artifact import load_program
try:
    load_program(Path(sys.argv[1])).load_method("forward")
except (ArtifactError, RuntimeError) as error:
    print(type(error).__name__, error)
"""
    assert fresh(code, tmp_path / "program.pte").startswith("ArtifactError ")


def test_message_of_a_foreign_file(tmp_path: Path) -> None:
    (tmp_path / "notes.pte").write_text("no program at all")
    with pytest.raises(ArtifactError, match=r"notes\.pte is no ExecuTorch program\.$"):
        load_program(tmp_path / "notes.pte")


@pytest.mark.parametrize("how", ["empty", "text", "half"])
def test_damaged_export(folder: Path, how: str) -> None:
    (folder / PTE).write_bytes(damaged((folder / PTE).read_bytes(), how))
    with pytest.raises(ArtifactError, match=PTE):
        ExportedModel.from_pretrained(folder)
    done = CliRunner().invoke(app, ["inspect", str(folder)], env={"COLUMNS": "160"})
    assert done.exit_code != 0
    assert PTE in done.output
    assert "Traceback" not in done.output


def test_missing_program(folder: Path) -> None:
    (folder / PTE).unlink()
    with pytest.raises(ArtifactError, match=f"lacks the file '{PTE}'"):
        ExportedModel.from_pretrained(folder)


def test_program_of_another_export(loaded: ExportedModel, other: ExportedModel, token_ids: Any) -> None:
    """The record says two outputs, the program has one."""
    mixed = ExportedModel(
        "executorch", {"model": attrs.evolve(loaded["model"], program=other["model"].program)}
    )
    with pytest.raises(ArtifactError, match=r"returns 1 outputs, the export's metadata says 2 and 2\."):
        mixed(**token_ids(1, 5))


def test_program_that_something_else_loaded(loaded: ExportedModel, saved: Path, tmp_path: Path) -> None:
    program = Runtime.get().load_program(saved / PTE)
    foreign = ExportedModel("executorch", {"model": attrs.evolve(loaded["model"], program=program)})
    with pytest.raises(ArtifactError, match=r"Program can't be written: .* Copy the file"):
        foreign.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
