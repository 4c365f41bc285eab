"""Exports on disk: saving, loading from wherever they lie, and refusing what is damaged or hostile."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from polyport.artifact import ExportedModel
from polyport.errors import ArtifactError, InputError, PolyportError
from polyport.manifest import MANIFEST, Manifest
from polyport.session import Session
from polyport.testing.capabilities import needs
from polyport.testing.hostile import ATTACKS, program_file, resign
from polyport.testing.models import EXAMPLES
from polyport.testing.suite import Suite
from polyport.testing.workbench import Workbench, quietly


class ArtifactTests(Suite):
    """Saving and loading."""

    def _check(self, workbench: Workbench, exported: ExportedModel) -> None:
        """An export of the first example answers right."""
        example = self.examples[0]
        for kwargs in workbench.cases(example).values():
            workbench.assert_same(workbench.expected(example, kwargs), quietly(exported, kwargs))

    def test_manifest_lists_every_file(self, workbench: Workbench, session: Session, example: str) -> None:
        """Each file in the folder is a config or is listed, and the program file has the format's suffix.

        On failure: return the name of every file you write from `polyport_save`, the program file first; write nothing
        else there, and nothing outside it.
        """
        folder = workbench.saved(example)
        manifest = Manifest.read(folder / MANIFEST)
        listed = set(manifest.file_names())
        assert {path.name for path in folder.iterdir()} == listed | {MANIFEST, "config.json"} | (
            {"generation_config.json"} & {path.name for path in folder.iterdir()}
        )
        assert program_file(folder).suffix == session.backend.suffix

    def test_saving_twice_gives_the_same_bytes(self, workbench: Workbench, tmp_path: Path) -> None:
        """Two saves of one export agree byte by byte, under any folder name.

        On failure: look for times, temporary paths, random identifiers and the order of sets in what you write.
        """
        exported = workbench.exported(self.examples[0])
        exported.save_pretrained(tmp_path / "one")
        exported.save_pretrained(tmp_path / "another name")
        assert _digests(tmp_path / "one") == _digests(tmp_path / "another name")

    @needs(deterministic_bytes=True)
    def test_exporting_twice_gives_the_same_bytes(self, workbench: Workbench, tmp_path: Path) -> None:
        """Two exports of one model, saved, agree byte by byte.

        On failure: as above; names from counters that outlive an export are another cause. If the runtime's own compiler
        is at fault, set `deterministic_bytes = False`.
        """
        example = EXAMPLES[self.examples[0]]
        workbench.export(example.build(), example).save_pretrained(tmp_path / "again")
        assert _digests(workbench.saved(example.name)) == _digests(tmp_path / "again")

    def test_saving_over_a_loaded_export(self, workbench: Workbench, copy: Path) -> None:
        """A loaded export can be saved to the folder it was loaded from, and is the same there.

        On failure: a loaded program refers to its files lazily, and `polyport_save` reads them while they are replaced.
        """
        before = _digests(copy)
        exported = workbench.load(copy)
        exported.save_pretrained(copy)
        assert not self.deterministic_bytes or _digests(copy) == before
        self._check(workbench, exported)
        self._check(workbench, workbench.load(copy))

    def test_a_fresh_export_runs_after_saving(self, workbench: Workbench, tmp_path: Path) -> None:
        """Saving doesn't use an export up, and it doesn't need the folder it was saved to.

        On failure: `polyport_save` changes the program, or moves files that the program still needs.
        """
        example = self.examples[0]
        workbench.exported(example).save_pretrained(tmp_path / "saved")
        shutil.rmtree(tmp_path / "saved")
        self._check(workbench, workbench.exported(example))

    def test_bare_program(self, workbench: Workbench, session: Session, tmp_path: Path) -> None:
        """`export.save("name.suffix")` writes the program under that name; another suffix is refused.

        On failure: name files after the component (`{name}{suffix}`) in `polyport_save`.
        """
        exported = workbench.exported(self.examples[0])
        exported.save(tmp_path / f"bare{session.backend.suffix}")
        assert (tmp_path / f"bare{session.backend.suffix}").stat().st_size > 0
        assert all(path.name.startswith("bare") for path in tmp_path.iterdir())
        with pytest.raises(InputError, match="wrong"):
            exported.save(tmp_path / "bare.wrong")

    def test_loading_from_a_read_only_folder(self, workbench: Workbench, copy: Path) -> None:
        """An export is loaded and run without a byte written beside it.

        On failure: caches and extracted files belong into a temporary folder.
        """
        before = {path.name: path.stat().st_mtime_ns for path in copy.iterdir()}
        for path in copy.iterdir():
            path.chmod(0o444)
        copy.chmod(0o555)
        try:
            self._check(workbench, workbench.load(copy))
            assert {path.name: path.stat().st_mtime_ns for path in copy.iterdir()} == before
        finally:
            copy.chmod(0o755)

    @pytest.mark.parametrize("subfolder", ["", "exports/first"])
    def test_loading_from_the_hub_cache(self, workbench: Workbench, tmp_path: Path, subfolder: str) -> None:
        """An export in the layout of the hub's cache is loaded by its id: every file is a link to a blob with another name.

        On failure: don't resolve links before you look for a file's neighbours or its suffix.
        """
        revision, source = "0" * 40, workbench.saved(self.examples[0])
        repository = tmp_path / "cache" / "models--someone--something"
        snapshot = repository / "snapshots" / revision / subfolder
        for folder in (repository / "refs", repository / "blobs", snapshot):
            folder.mkdir(parents=True)
        (repository / "refs" / "main").write_text(revision)
        for path in source.iterdir():
            blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
            shutil.copy(path, blob)
            (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
        exported = workbench.load(
            "someone/something", subfolder=subfolder, cache_dir=tmp_path / "cache", local_files_only=True
        )
        self._check(workbench, exported)

    def test_loading_after_a_rename(self, workbench: Workbench, copy: Path) -> None:
        """A folder can be moved and renamed, and is then loaded from its new place.

        On failure: an absolute path, or the folder's name, is recorded in the program or the metadata.
        """
        moved = copy.rename(copy.parent / "elsewhere, renamed")
        self._check(workbench, workbench.load(moved))

    @needs(loading_needs_trust=False)
    def test_loading_needs_no_trust(self, workbench: Workbench) -> None:
        """`from_pretrained` works with its defaults: what you save holds no code.

        On failure: leave pickles out of your files; if loading runs code by its nature, set `loading_needs_trust = True`.
        """
        self._check(workbench, ExportedModel.from_pretrained(workbench.saved(self.examples[0])))

    @needs(loading_needs_trust=True)
    def test_loading_without_trust_is_refused(self, workbench: Workbench) -> None:
        """Files that hold code are not touched until the user says so.

        On failure: raise an `ArtifactError` that names `trust_remote_code` in `polyport_load` when `trust` is false,
        before anything is read.
        """
        with pytest.raises(ArtifactError, match="trust_remote_code=True"):
            ExportedModel.from_pretrained(workbench.saved(self.examples[0]))

    def test_hostile_export_is_refused(self, workbench: Workbench, copy: Path, attack: str) -> None:
        """A damaged or prepared export gives an `ArtifactError`, whatever is wrong with it, even if the user trusts it.

        On failure: core checks names, sizes and sums; what is "signed" agrees with them and is yours to refuse. Turn
        whatever your runtime raises in `polyport_load` into an `ArtifactError` that names the file. An error at the first
        call is early enough for what only the runtime can tell, if it is an `ArtifactError` too.
        """
        ATTACKS[attack](copy)
        beside = sorted(copy.parent.iterdir())
        with pytest.raises(ArtifactError) as caught:
            workbench.load(copy)(**workbench.cases(self.examples[0])["sample's sizes"])
        assert str(caught.value).strip()
        assert sorted(copy.parent.iterdir()) == beside, "something was written"

    def test_program_of_another_export_is_refused(self, workbench: Workbench, copy: Path) -> None:
        """A program of another model under this export's metadata gives a `polyport` error.

        On failure: compare the program's own inputs with `metadata.inputs` when you make the runner.
        """
        shutil.copy(program_file(workbench.saved("image")), program_file(copy))
        resign(copy)
        with pytest.raises(PolyportError):
            workbench.load(copy)(**workbench.cases(self.examples[0])["sample's sizes"])


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
