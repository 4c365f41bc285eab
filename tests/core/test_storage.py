from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polyport import ExportedModel, placement, storage
from polyport.errors import ArtifactError, BackendContractError, ExportError, InputError
from polyport.session import Session

MakeExport = Callable[..., ExportedModel]


class _Config:
    """What has a `save_pretrained` of its own: a config, a tokenizer."""

    def __init__(self, name: str, text: str = "{}") -> None:
        self.name, self.text = name, text

    def save_pretrained(self, directory: Path) -> None:
        (Path(directory) / self.name).write_text(self.text)


def _content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# ── saving and loading ──────────────────────────────────────────────────────────────────────────────────────────────


def test_save_and_load(make_export: MakeExport, tmp_path: Path) -> None:
    make_export(b"hello", data=True).save_pretrained(tmp_path / "out", processor=_Config("tokenizer.json"))
    assert sorted(_content(tmp_path / "out")) == [
        "export.json",
        "model.fake",
        "model.fake.data",
        "tokenizer.json",
    ]
    loaded = ExportedModel.from_pretrained(tmp_path / "out")
    assert loaded.program == b"hello"
    assert loaded.export_format == "fake"
    torch.testing.assert_close(loaded(x=torch.ones(2, 3))["y"], torch.full((2, 3), 2.0), rtol=0, atol=0)


def test_manifest_lists_every_file_with_its_sum(make_export: MakeExport, tmp_path: Path) -> None:
    make_export(data=True).save_pretrained(tmp_path / "out")
    document = json.loads((tmp_path / "out" / "export.json").read_text())
    entry = document["components"]["model"]
    assert document["schema_version"] == 1
    assert document["export_format"] == "fake"
    assert entry["file"] == "model.fake"
    assert [file["name"] for file in entry["files"]] == ["model.fake", "model.fake.data"]
    assert all(len(file["sha256"]) == 64 and file["size"] > 0 for file in entry["files"])


def test_same_export_same_bytes(make_export: MakeExport, tmp_path: Path) -> None:
    make_export(data=True).save_pretrained(tmp_path / "one")
    make_export(data=True).save_pretrained(tmp_path / "two")
    assert _content(tmp_path / "one") == _content(tmp_path / "two")


def test_configs_come_back(make_export: MakeExport, tmp_path: Path) -> None:
    from transformers import BertConfig, GenerationConfig

    export = make_export(config=BertConfig(hidden_size=24), generation_config=GenerationConfig(max_length=7))
    export.save_pretrained(tmp_path / "out")
    loaded = ExportedModel.from_pretrained(tmp_path / "out")
    assert loaded.config is not None
    assert loaded.config.hidden_size == 24
    assert loaded.generation_config is not None
    assert loaded.generation_config.max_length == 7


def test_unknown_model_type_still_loads(make_export: MakeExport, tmp_path: Path) -> None:
    make_export().save_pretrained(tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text('{"model_type": "of_the_future", "depth": 3}')
    assert ExportedModel.from_pretrained(tmp_path / "out").config.depth == 3


def test_config_with_code_runs_none(make_export: MakeExport, tmp_path: Path) -> None:
    make_export().save_pretrained(tmp_path / "out")
    (tmp_path / "out" / "evil.py").write_text("raise SystemExit('ran')")
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    ExportedModel.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_damaged_config(make_export: MakeExport, tmp_path: Path, name: str) -> None:
    make_export().save_pretrained(tmp_path / "out")
    (tmp_path / "out" / name).write_text("{")
    with pytest.raises(ArtifactError, match=rf"{name} can't be read"):
        ExportedModel.from_pretrained(tmp_path / "out")


def test_every_file_is_checked(make_export: MakeExport, tmp_path: Path) -> None:
    make_export(data=True).save_pretrained(tmp_path / "out")
    (tmp_path / "out" / "model.fake.data").write_bytes(b"something else")
    with pytest.raises(ArtifactError, match=r"model\.fake\.data"):
        ExportedModel.from_pretrained(tmp_path / "out")


def test_loading_writes_nothing(make_export: MakeExport, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    make_export().save_pretrained(folder)
    before = {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())}
    ExportedModel.from_pretrained(folder)(x=torch.ones(1, 3))
    assert {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())} == before


def test_architecture_of_the_manifest_imports_transformers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    asked: list[str] = []
    monkeypatch.setattr(
        type(transformers), "__getattr__", lambda self, name: asked.append(name), raising=False
    )
    for name in ("os", "__loader__", "exporters", "models.bert", "", None, "Bert Model"):
        storage.import_architecture(name)
    assert asked == []


# ── in one step ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _stages() -> Iterator[tuple[str, Any, str]]:
    yield "programs", Session, "save"
    yield "record", storage, "record_file"
    yield "manifest", storage.Manifest, "write"
    yield "other files", placement, "_keep_other_files"
    yield "exchange", placement, "_exchange"


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt(), SystemExit()])
@pytest.mark.parametrize(("owner", "name"), [stage[1:] for stage in _stages()], ids=[s[0] for s in _stages()])
def test_old_export_survives_a_failure(
    make_export: MakeExport,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    error: BaseException,
) -> None:
    folder = tmp_path / "out"
    make_export(b"old", data=True).save_pretrained(folder)
    (folder / "mine.txt").write_text("mine")
    before = _content(folder)

    def fail(*_: Any, **__: Any) -> None:
        raise error

    new = make_export(b"new")
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fail)
        with pytest.raises(type(error)):
            new.save_pretrained(folder)
    assert _content(folder) == before
    assert sorted(tmp_path.glob(".out*")) == []
    new.save_pretrained(folder)
    assert ExportedModel.from_pretrained(folder).program == b"new"


def test_failure_leaves_nothing_where_nothing_was(
    make_export: MakeExport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(storage.Manifest, "write", fail)
    with pytest.raises(KeyboardInterrupt):
        make_export().save_pretrained(tmp_path / "deep" / "out")
    assert list((tmp_path / "deep").iterdir()) == []


def test_failure_after_the_exchange_leaves_the_new_one(
    make_export: MakeExport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    make_export(b"old").save_pretrained(folder)
    exchange = placement._exchange

    def then_fail(one: Path, other: Path) -> bool:
        exchange(one, other)
        raise KeyboardInterrupt

    monkeypatch.setattr(placement, "_exchange", then_fail)
    with pytest.raises(KeyboardInterrupt):
        make_export(b"new").save_pretrained(folder)
    assert ExportedModel.from_pretrained(folder).program == b"new"
    assert sorted(tmp_path.glob(".out*")) == []


def test_without_an_atomic_exchange(
    make_export: MakeExport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_exchange", lambda *_: False)
    folder = tmp_path / "out"
    make_export(b"old", data=True).save_pretrained(folder)
    make_export(b"new").save_pretrained(folder)
    assert sorted(_content(folder)) == ["export.json", "model.fake"]
    before = _content(folder)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if ".new-" in self.name:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(KeyboardInterrupt):
        make_export(b"newer").save_pretrained(folder)
    assert _content(folder) == before
    assert sorted(tmp_path.glob(".out*")) == []


def test_other_files_stay(make_export: MakeExport, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    (folder / "notes").mkdir(parents=True)
    (folder / "notes" / "a.txt").write_text("a")
    (folder / "link").symlink_to("notes/a.txt")
    (folder / "dangling").symlink_to("nowhere")
    (folder / ".hidden").write_text("h")
    make_export(data=True).save_pretrained(folder)
    make_export().save_pretrained(folder)
    assert sorted(_content(folder)) == [".hidden", "export.json", "link", "model.fake", "notes/a.txt"]
    assert (folder / "link").is_symlink()
    assert (folder / "dangling").is_symlink()


def test_old_exports_files_go(make_export: MakeExport, tmp_path: Path) -> None:
    """Also the configs: another model's generation config must not stay behind."""
    from transformers import GenerationConfig

    folder = tmp_path / "out"
    make_export(
        data=True, components=("encoder", "decoder"), generation_config=GenerationConfig()
    ).save_pretrained(folder)
    make_export().save_pretrained(folder)
    assert sorted(_content(folder)) == ["export.json", "model.fake"]


def test_over_the_one_it_was_loaded_from(make_export: MakeExport, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    make_export(b"same", data=True).save_pretrained(folder)
    before = _content(folder)
    loaded = ExportedModel.from_pretrained(folder)
    loaded.save_pretrained(folder)
    assert _content(folder) == before
    assert loaded(x=torch.ones(1, 3))["y"].tolist() == [[2.0, 2.0, 2.0]]


def test_into_the_working_directory(
    make_export: MakeExport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must stay the same directory: a process whose working directory is gone can't open a relative path."""
    monkeypatch.chdir(tmp_path)
    inode = tmp_path.stat().st_ino
    (tmp_path / "mine.txt").write_text("mine")
    make_export(b"old", data=True).save_pretrained(".")
    make_export(b"new").save_pretrained(".")
    assert Path.cwd() == tmp_path
    assert tmp_path.stat().st_ino == inode
    assert [name for name in _content(tmp_path) if "site-" not in name] == [
        "export.json",
        "mine.txt",
        "model.fake",
    ]
    assert ExportedModel.from_pretrained(".").program == b"new"


@pytest.mark.parametrize("moves", range(4))
def test_file_by_file_is_undone_on_failure(
    make_export: MakeExport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    folder = tmp_path / "out"
    make_export(b"old", data=True).save_pretrained(folder)
    before = _content(folder)
    monkeypatch.setattr(placement, "_can_step_aside", lambda _: False)
    rename, count = Path.rename, 0

    def fail(self: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count == moves + 1:
            raise KeyboardInterrupt
        return rename(self, target)

    new = make_export(b"new", data=True)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fail)
        with pytest.raises(KeyboardInterrupt):
            new.save_pretrained(folder)
    assert _content(folder) == before
    make_export(b"new", data=True).save_pretrained(folder)
    assert ExportedModel.from_pretrained(folder).program == b"new"


def test_place_taken_by_a_file(make_export: MakeExport, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ExportError, match="is a file"):
        make_export().save_pretrained(tmp_path / "out")


def test_place_that_cannot_be_written(make_export: MakeExport, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="can't be written to"):
        make_export().save_pretrained(tmp_path / "file" / "out")


def test_through_a_link(make_export: MakeExport, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to("real")
    make_export(b"old").save_pretrained(tmp_path / "alias")
    make_export(b"new").save_pretrained(tmp_path / "alias")
    assert (tmp_path / "alias").is_symlink()
    assert ExportedModel.from_pretrained(tmp_path / "real").program == b"new"
    assert sorted(tmp_path.glob(".*")) == []


def test_permissions(make_export: MakeExport, tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        make_export().save_pretrained(tmp_path / "new")
        (tmp_path / "old").mkdir(mode=0o700)
        make_export().save_pretrained(tmp_path / "old")
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "new" / "export.json").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "old").stat().st_mode) == 0o700


@pytest.mark.parametrize("files", ["model.fake", ["../model.fake"], ["missing.fake"], [], [3]])
def test_backend_names_files_it_did_not_write(
    make_export: MakeExport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Any
) -> None:
    from polyport.markers import hookimpl

    class Extra:
        @hookimpl
        def polyport_save(self, components: Any, directory: Path) -> Any:
            (directory / "model.fake").write_bytes(b"x")
            return {"model": files}

    export = make_export()
    export._session = Session("fake", [Extra()])
    with pytest.raises(BackendContractError, match="polyport_save"):
        export.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ── the bare program ────────────────────────────────────────────────────────────────────────────────────────────────


def test_save_the_bare_program(make_export: MakeExport, tmp_path: Path) -> None:
    make_export(b"one", data=True).save(tmp_path / "new" / "my.model.fake")
    assert sorted(_content(tmp_path / "new")) == ["my.model.fake", "my.model.fake.data"]
    make_export(b"two").save(tmp_path / "new" / "my.model.fake")
    assert _content(tmp_path / "new") == {"my.model.fake": b"two"}  # the stale data file is gone


def test_bare_program_needs_its_suffix(make_export: MakeExport, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"saved as \*\.fake, not as 'model\.bin'"):
        make_export().save(tmp_path / "model.bin")


def test_bare_program_of_several_components(make_export: MakeExport, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has the components encoder, decoder"):
        make_export(components=("encoder", "decoder")).save(tmp_path / "model.fake")


# ── finding ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_subfolder(make_export: MakeExport, tmp_path: Path) -> None:
    make_export(b"sub").save_pretrained(tmp_path / "repo" / "fake" / "small")
    assert ExportedModel.from_pretrained(tmp_path / "repo", subfolder="fake/small").program == b"sub"
    with pytest.raises(ArtifactError, match="no export"):
        ExportedModel.from_pretrained(tmp_path / "repo")


@pytest.mark.parametrize("subfolder", ["..", "a/../../b", "/etc"])
def test_subfolder_must_stay_inside(tmp_path: Path, subfolder: str) -> None:
    with pytest.raises(ArtifactError, match="leads out of the export"):
        ExportedModel.from_pretrained(tmp_path, subfolder=subfolder)


@pytest.mark.parametrize("name", ["a/b/c", "no such folder", "/missing/folder", "https://x.y/z"])
def test_neither_folder_nor_repository(name: str) -> None:
    with pytest.raises(ArtifactError, match=r"no directory with an export, nor the id"):
        ExportedModel.from_pretrained(name)


def test_a_file_is_no_export(tmp_path: Path) -> None:
    (tmp_path / "model.fake").write_text("")
    with pytest.raises(ArtifactError, match="no directory with an export"):
        ExportedModel.from_pretrained(tmp_path / "model.fake")


# ── the hub ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Hub:
    """`hf_hub_download` of a repository that lies in a folder, with the cache's layout."""

    def __init__(self, source: Path, cache: Path) -> None:
        self.source, self.cache = source, cache
        self.asked: list[tuple[str, Any]] = []
        self.commit = "c0ffee"
        self.broken: Exception | None = None

    def __call__(self, repo_id: str, filename: str, *, subfolder: str | None = None, **options: Any) -> str:
        from huggingface_hub.errors import EntryNotFoundError

        self.asked.append((filename, options.get("revision")))
        if self.broken is not None and filename == "config.json":
            raise self.broken
        name = f"{subfolder}/{filename}" if subfolder else filename
        if not (self.source / name).is_file():
            raise EntryNotFoundError(f"404: {name}")
        revision = options.get("revision")
        commit = revision if revision and revision != "main" else self.commit
        path = self.cache / "models--me--it" / "snapshots" / commit / name
        blob = self.cache / "models--me--it" / "blobs" / name.replace("/", "-")
        path.parent.mkdir(parents=True, exist_ok=True)
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes((self.source / name).read_bytes())
        if not path.exists():
            path.symlink_to(os.path.relpath(blob, path.parent))
        if filename == "export.json":
            self.commit = "deadbeef"  # somebody pushes while we download
        return str(path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Hub:
    import huggingface_hub

    fake = _Hub(tmp_path / "repo", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake)
    monkeypatch.chdir(tmp_path)
    return fake


@pytest.mark.parametrize("subfolder", ["", "fake", "fake/small"])
def test_hub_fetches_the_exports_files_only(make_export: MakeExport, hub: _Hub, subfolder: str) -> None:
    make_export(b"hub", data=True).save_pretrained(hub.source / subfolder)
    (hub.source / subfolder / "pytorch_model.bin").write_bytes(b"huge")
    loaded = ExportedModel.from_pretrained("me/it", subfolder=subfolder, token="secret", revision="main")
    assert loaded.program == b"hub"
    names = [name for name, _ in hub.asked]
    assert names == ["export.json", "model.fake", "model.fake.data", "config.json", "generation_config.json"]
    # all of one commit, whatever is pushed meanwhile
    assert [revision for _, revision in hub.asked] == ["main", *["c0ffee"] * 4]


def test_hub_finds_companions_that_another_tool_does_not_list(make_export: MakeExport, hub: _Hub) -> None:
    make_export(b"hub", data=True).save_pretrained(hub.source)
    document = json.loads((hub.source / "export.json").read_text())
    del document["components"]["model"]["files"]
    (hub.source / "export.json").write_text(json.dumps(document))
    ExportedModel.from_pretrained("me/it")
    assert "model.fake.data" in [name for name, _ in hub.asked]


def test_hub_manifest_cannot_ask_for_other_files(make_export: MakeExport, hub: _Hub) -> None:
    make_export().save_pretrained(hub.source)
    text = (hub.source / "export.json").read_text().replace("model.fake", "../secrets.fake")
    (hub.source / "export.json").write_text(text)
    with pytest.raises(ArtifactError, match="plain names"):
        ExportedModel.from_pretrained("me/it")
    assert [name for name, _ in hub.asked] == ["export.json"]


def test_hub_without_an_export(hub: _Hub) -> None:
    with pytest.raises(
        ArtifactError, match=r"'me/it' is no local directory, and no export could be fetched.*404"
    ):
        ExportedModel.from_pretrained("me/it")


def test_hub_lacks_a_program_file(make_export: MakeExport, hub: _Hub) -> None:
    make_export().save_pretrained(hub.source)
    (hub.source / "model.fake").unlink()
    with pytest.raises(ArtifactError, match=r"404: model\.fake"):
        ExportedModel.from_pretrained("me/it")


def test_hub_unreachable_for_an_optional_file(
    make_export: MakeExport, hub: _Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, a file that isn't cached isn't there; online, nobody knows."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    make_export().save_pretrained(hub.source)
    hub.broken = LocalEntryNotFoundError("connection lost")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ArtifactError, match="connection lost"):
        ExportedModel.from_pretrained("me/it")
    assert ExportedModel.from_pretrained("me/it", local_files_only=True).config is None


def test_hub_errors_of_any_kind_are_ours(hub: _Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_: Any, **__: Any) -> str:
        raise RuntimeError("proxy\nsays no")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(ArtifactError, match=r"proxy$"):
        ExportedModel.from_pretrained("me/it")


def test_push_to_hub(make_export: MakeExport, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    seen: dict[str, Any] = {}

    class Api:
        def __init__(self, token: str | None = None) -> None:
            seen["token"] = token

        def create_repo(self, repo_id: str, **options: Any) -> None:
            seen["created"] = (repo_id, options)

        def upload_folder(self, *, folder_path: str, **options: Any) -> str:
            seen["files"] = sorted(path.name for path in Path(folder_path).iterdir())
            seen["upload"] = options
            return "https://hub/commit"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    answer = make_export(data=True).push_to_hub(
        "me/it",
        subfolder="fake",
        token="t",
        private=True,
        commit_message="m",
        processor=_Config("tokenizer.json"),
    )
    assert answer == "https://hub/commit"
    assert seen["token"] == "t"
    assert seen["created"] == ("me/it", {"exist_ok": True, "private": True})
    assert seen["files"] == ["export.json", "model.fake", "model.fake.data", "tokenizer.json"]
    assert seen["upload"] == {"repo_id": "me/it", "path_in_repo": "fake", "commit_message": "m"}
