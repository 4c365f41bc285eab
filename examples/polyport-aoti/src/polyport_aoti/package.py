"""The file that a compiled model is: where it lies, and whether this machine can run it."""

from __future__ import annotations

import json
import shutil
import weakref
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from polyport.errors import ArtifactError
from polyport.metadata import ExportMetadata

#: Instruction sets that the compiler generates for -> how torch is asked for them.
_INSTRUCTIONS = {
    "AVX2": "_is_avx2_supported",
    "AVX512": "_is_avx512_supported",
    "AVX512_VNNI": "_is_vnni_supported",
    "AMX": "_is_amx_tile_supported",
}


class Package:
    """A `.pt2` file with machine code.

    Args:
        path: The file.
        folder: The temporary folder it lies in, which goes when the package does; None for a file of the user's.
    """

    def __init__(self, path: Path, folder: str | None = None) -> None:
        self.path = path
        if folder is not None:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def copy_to(self, target: Path) -> str:
        """Write the package to another file; returns that file's name."""
        shutil.copyfile(self.path, target)
        return target.name

    def describe(self) -> dict[str, Any]:
        """What is inside, for `polyport inspect`."""
        with zipfile.ZipFile(self.path) as archive:
            sizes = {Path(entry.filename).suffix: entry.file_size for entry in archive.infolist()}
        return {"code_bytes": sizes.get(".so", 0), **compiled_for(self.path)}


def compiled_for(path: Path) -> dict[str, str]:
    """What the compiler wrote into a package about the machine it is for: `device`, `machine`, `isa`.

    Raises:
        ArtifactError: The file is no package, or a damaged one.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            records = [
                json.loads(archive.read(name)) for name in names if name.endswith("wrapper_metadata.json")
            ]
    except (zipfile.BadZipFile, OSError, ValueError, EOFError) as error:
        raise ArtifactError(
            f"{path} is no readable package: {error}.", stage="load", backend="aoti"
        ) from error
    if (
        len(records) != 1
        or not isinstance(records[0], Mapping)
        or not any(name.endswith(".so") for name in names)
    ):
        raise ArtifactError(f"{path} is no package with one compiled model.", stage="load", backend="aoti")
    fields = {"device": "AOTI_DEVICE_KEY", "machine": "AOTI_MACHINE", "isa": "AOTI_CPU_ISA"}
    return {name: str(records[0].get(key, "")) for name, key in fields.items()}


def load_package(path: Path, metadata: ExportMetadata, *, trust: bool) -> Package:
    """A package that was saved, after checking that it may and can run here. Nothing of it runs yet.

    Raises:
        ArtifactError: It needs trust that was not given, is damaged, or was compiled for something else.
    """
    if not trust:
        raise ArtifactError(
            f"{path} holds machine code, which can do anything that you can. If you trust its origin, load it with "
            "trust_remote_code=True.",
            stage="load",
            backend="aoti",
        )
    target = compiled_for(path)
    lacking = [name for name in target["isa"].split() if not _has(name)]
    if lacking:
        raise ArtifactError(
            f"{path} was compiled for {target['machine']} with {' '.join(lacking)}, which this machine lacks. Export the "
            "model here.",
            stage="load",
            backend="aoti",
        )
    made_by = metadata.packages.get("torch")
    if made_by is not None and Version(made_by).release[:2] != Version(torch.__version__).release[:2]:
        raise ArtifactError(
            f"{path} was compiled against torch {made_by}; torch {torch.__version__} is installed, and compiled code is "
            "not exchanged between releases. Export the model again.",
            stage="load",
            backend="aoti",
        )
    return Package(path)


def _has(instructions: str) -> bool:
    """Whether this machine has an instruction set; what torch can't tell is taken to be there."""
    supported = getattr(torch.cpu, _INSTRUCTIONS.get(instructions, ""), None)
    return supported is None or bool(supported())
