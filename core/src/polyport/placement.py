"""Putting a finished export in the place of what was there: in one step, or undone when it fails."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyport.errors import ArtifactError, ExportError
from polyport.manifest import MANIFEST, Manifest

#: What an export writes beside its programs; they belong to it although its manifest doesn't list them.
_CONFIGS = ("config.json", "generation_config.json")


@contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """Write a directory's new content in the body of a `with`; what was there before gives way at its end.

    The old content stays, whole, until the new one is. An exception in the body, or later, leaves it as it was. Files that
    belong to no export stay in any case.

    Args:
        directory: The directory, or where it shall be.

    Yields:
        An empty directory to write into.

    Raises:
        ExportError: The place is taken by a file, or can't be written to.
    """
    directory = directory.resolve()  # a link stays a link: what it leads to is replaced
    if directory.exists() and not directory.is_dir():
        raise ExportError(f"{directory} is a file; an export needs a directory.", stage="save")
    inside = directory.is_dir() and not _can_step_aside(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(
            tempfile.mkdtemp(dir=directory if inside else directory.parent, prefix=f".{directory.name}.new-")
        )
    except OSError as error:
        raise ExportError(f"{directory} can't be written to: {error.strerror}.", stage="save") from error
    try:
        staging.chmod(directory.stat().st_mode & 0o7777 if directory.is_dir() else 0o777 & ~_umask())
        yield staging
        for entry in staging.iterdir():
            if entry.is_file():
                entry.chmod(0o666 & ~_umask())  # safetensors writes files that only their owner can read
        if inside:
            _replace_files(staging, directory)
        else:
            if directory.exists():
                _keep_other_files(directory, staging)
            _replace_directory(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _umask() -> int:
    # mkdtemp makes a folder that only its owner can read; the process's umask can only be read by setting it
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _can_step_aside(directory: Path) -> bool:
    """Whether the directory itself can be replaced: no mount point, nobody's working directory, in a writable place."""
    if os.path.ismount(directory) or not os.access(directory.parent, os.W_OK | os.X_OK):
        return False
    try:
        return not Path.cwd().is_relative_to(directory)
    except OSError:  # the working directory is gone
        return True


def _owned(directory: Path) -> set[str]:
    """Names of the files of the export in a directory."""
    # where no export was, or a damaged one, all but the manifest is somebody's
    owned = {MANIFEST}
    with contextlib.suppress(ArtifactError):
        owned.update(Manifest.read(directory / MANIFEST).file_names(), _CONFIGS)
    return owned


# ── the directory as a whole ────────────────────────────────────────────────────────────────────────────────────────


def _keep_other_files(old: Path, new: Path) -> None:
    """Bring what isn't part of the old export along into the new directory, as hard links where possible."""
    owned = _owned(old)
    for entry in old.iterdir():
        target = new / entry.name
        if entry.name in owned or os.path.lexists(target):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, target, copy_function=_link, symlinks=True)
        elif entry.is_symlink():
            target.symlink_to(entry.readlink())
        else:
            _link(str(entry), str(target))


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _replace_directory(new: Path, directory: Path) -> None:
    """Put the finished directory where the old one is, or isn't; the old one ends up at `new`."""
    if not directory.exists():
        new.rename(directory)
    elif not _exchange(new, directory):
        # no exchange on this system: the old export steps aside first and comes back if the second step fails
        aside = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}.old-"))
        try:
            directory.rename(aside / "export")
            try:
                new.rename(directory)
            except BaseException:
                (aside / "export").rename(directory)
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories atomically, where the system can (Linux's renameat2 with RENAME_EXCHANGE)."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if renameat2 is None:
        return False
    at_fdcwd, rename_exchange = -100, 2
    if renameat2(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(error, os.strerror(error), str(other))


# ── file by file ────────────────────────────────────────────────────────────────────────────────────────────────────


def _replace_files(new: Path, directory: Path) -> None:
    """Put the finished files into a directory that has to stay itself, the manifest last.

    An exception brings the old files back. If the process is killed in between, the sums in the manifest don't fit the
    files, and loading says so.
    """
    aside = Path(tempfile.mkdtemp(dir=directory, prefix=f".{directory.name}.old-"))
    names = sorted((entry.name for entry in new.iterdir()), key=lambda name: name == MANIFEST)
    touched: list[str] = []
    try:
        for name in [*(_owned(directory) - set(names)), *names]:
            touched.append(name)
            if os.path.lexists(directory / name):
                (directory / name).rename(aside / name)
            if name in names:
                (new / name).rename(directory / name)
    except BaseException:
        for name in reversed(touched):
            if os.path.lexists(directory / name) and not os.path.lexists(new / name):
                (directory / name).rename(new / name)
            if os.path.lexists(aside / name):
                (aside / name).rename(directory / name)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
