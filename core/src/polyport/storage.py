"""An export on disk: writing it in one step, finding it, and reading it back."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from polyport.errors import ArtifactError, PolyportError
from polyport.manifest import (
    MANIFEST,
    ComponentRecord,
    FileRecord,
    Manifest,
    checked_file,
    record_file,
)
from polyport.metadata import ExportMetadata
from polyport.pipeline import ExportedComponent
from polyport.placement import replacing
from polyport.session import Session

if TYPE_CHECKING:
    import torch

    from polyport.artifact import ExportedModel

#: File of the tensors that no component covers.
LEFTOVERS = "leftovers.safetensors"

# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def save(exported: ExportedModel, directory: Path, session: Session, processor: Any = None) -> None:
    """Write an export to a directory, which changes in one step (see `ExportedModel.save_pretrained`)."""
    with replacing(directory) as staging:
        files = session.save(exported.components, staging)
        records = {
            name: ComponentRecord(
                tuple(record_file(staging / file) for file in files[name]), component.metadata
            )
            for name, component in exported.components.items()
        }
        for part in (exported.config, exported.generation_config, processor):
            if part is not None:
                part.save_pretrained(staging)
        leftovers = None
        if exported.leftovers:
            leftovers = _write_leftovers(exported.leftovers, staging / LEFTOVERS)
        Manifest(exported.export_format, records, generation=exported.generation, leftovers=leftovers).write(
            staging
        )


def _write_leftovers(tensors: Mapping[str, torch.Tensor], path: Path) -> FileRecord:
    from safetensors.torch import save_file

    save_file({name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}, path)
    return record_file(path)


# ── finding ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def locate(path_or_id: str | os.PathLike[str], subfolder: str, **download: Any) -> Path:
    """The directory of an export: a local one, or the part of a hub repository's snapshot that belongs to it.

    Raises:
        ArtifactError: Neither a directory nor a reachable repository, or the repository holds no export.
    """
    parts = Path(subfolder).parts
    if Path(subfolder).is_absolute() or ".." in parts:
        raise ArtifactError(f"The subfolder {subfolder!r} leads out of the export.", stage="load")
    path = Path(path_or_id)
    if path.is_dir():
        return path / subfolder
    if path.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path_or_id)):
        raise ArtifactError(
            f"{path} is no directory with an export, nor the id of a hub repository.", stage="load"
        )
    return _fetch(str(path_or_id), subfolder, download)


def _fetch(repo_id: str, subfolder: str, download: dict[str, Any]) -> Path:
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    def get(name: str) -> Path:
        return Path(hf_hub_download(repo_id, name, subfolder=subfolder or None, **download))

    offline = download.get("local_files_only") or constants.HF_HUB_OFFLINE
    try:
        directory = get(MANIFEST).parent
        # the rest must come from the same commit, whatever is pushed meanwhile
        download = {**download, "revision": _commit(directory, subfolder) or download.get("revision")}
        manifest = Manifest.read(directory / MANIFEST)
        for name in manifest.file_names():
            get(name)
        optional = ["config.json", "generation_config.json"]
        if not manifest.complete:
            templates = Session(manifest.export_format).backend.companions
            optional += [
                companion(name, template) for name in manifest.file_names() for template in templates
            ]
        for name in optional:
            try:
                get(name)
            except EntryNotFoundError as error:
                if isinstance(error, LocalEntryNotFoundError) and not offline:
                    raise  # the connection broke; whether the repository has the file is not known
    except PolyportError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ArtifactError(
            f"{repo_id!r} is no local directory, and no export could be fetched from the hub repository of that name: "
            f"{reason}",
            stage="load",
        ) from error
    return directory


def _commit(directory: Path, subfolder: str) -> str | None:
    """The commit of a folder in the hub's cache (`<repo>/snapshots/<commit>/<subfolder>`)."""
    root = directory
    for _ in Path(subfolder).parts:
        root = root.parent
    return root.name if root.parent.name == "snapshots" else None


def companion(name: str, template: str) -> str:
    """The name of a file that belongs to a program file (see `BackendInfo.companions`)."""
    return template.format(file=name, stem=Path(name).stem)


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def load(
    path_or_id: str | os.PathLike[str], subfolder: str, *, trust: bool, **download: Any
) -> dict[str, Any]:
    """A saved export, as the arguments that make an `ExportedModel`.

    Raises:
        ArtifactError: There is no export, or it is damaged or unsafe.
    """
    directory = locate(path_or_id, subfolder, **download)
    manifest = read_manifest(directory)
    session = Session(manifest.export_format)
    return {
        "export_format": manifest.export_format,
        "components": load_components(manifest, directory, session, trust=trust),
        "config": load_config(directory),
        "generation_config": load_generation_config(directory),
        "session": session,
        "generation": manifest.generation,
        "leftovers": load_leftovers(manifest, directory),
    }


def read_manifest(directory: Path) -> Manifest:
    """The manifest of an export's directory.

    Raises:
        ArtifactError: See `Manifest.read`.
    """
    return Manifest.read(directory / MANIFEST)


def load_components(
    manifest: Manifest, directory: Path, session: Session, *, trust: bool
) -> dict[str, ExportedComponent]:
    """Read every component, after checking every file.

    Raises:
        ArtifactError: A file or the metadata is damaged or unsafe.
    """
    if manifest.generation is not None:
        import_architecture(
            manifest.generation.architecture
        )  # its parts have classes that transformers doesn't show
    components = {}
    checked: dict[FileRecord, Path] = {}  # files that components share are hashed once
    for name, record in manifest.components.items():
        files = record.files
        if not manifest.complete:
            beside = [
                companion(file.name, template) for file in files for template in session.backend.companions
            ]
            files += tuple(FileRecord(file) for file in beside if (directory / file).exists())
        for file in files:
            checked[file] = checked.get(file) or checked_file(directory, file)
        paths = [checked[file] for file in files]
        import_architecture(record.metadata.architecture)
        metadata = completed(record.metadata)
        components[name] = ExportedComponent(
            program=session.load(name, paths, metadata, trust), metadata=metadata
        )
    return components


def load_leftovers(manifest: Manifest, directory: Path) -> dict[str, torch.Tensor]:
    """The tensors that no component covers, by name; empty where there are none.

    Raises:
        ArtifactError: The file is missing or damaged.
    """
    if manifest.leftovers is None:
        return {}
    from safetensors.torch import load_file

    path = checked_file(directory, manifest.leftovers)
    try:
        return load_file(path)
    except Exception as error:
        raise ArtifactError(f"{path} can't be read: {error}", stage="load") from error


def completed(metadata: ExportMetadata) -> ExportMetadata:
    """Metadata of another tool with names and shapes filled in from what it does record."""
    if metadata.inputs or metadata.in_spec is None:
        return metadata
    from polyport.foreign import described_inputs, described_outputs

    return attrs.evolve(metadata, inputs=described_inputs(metadata), outputs=described_outputs(metadata))


def import_architecture(name: str | None) -> None:
    """Import the transformers module that defines a model class, and so its output and cache classes.

    The name is looked up among transformers' public names, which import nothing but transformers' own modules. Unknown
    names are left alone: the classes they would define are then refused where they are needed.
    """
    if not name or not name.isidentifier() or not name[0].isupper():
        return
    import transformers
    import transformers.modeling_outputs  # the outputs that many models share

    with contextlib.suppress(Exception):  # a model that needs a package that is not installed
        getattr(transformers, name, None)


def load_config(directory: Path) -> Any:
    """The model's config, or None where the export has none.

    Raises:
        ArtifactError: It is there but can't be read.
    """
    if not (directory / "config.json").is_file():
        return None
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - transformers raises whatever a config leads it to
        return _unknown_config(directory, error)


def _unknown_config(directory: Path, error: Exception) -> Any:
    """The values of a config whose model type this transformers doesn't know: a forward call needs no more."""
    from transformers import PreTrainedConfig

    try:
        return PreTrainedConfig.from_pretrained(str(directory), local_files_only=True)
    except Exception:  # noqa: BLE001 - as above
        raise ArtifactError(f"{directory / 'config.json'} can't be read: {error}", stage="load") from error


def load_generation_config(directory: Path) -> Any:
    """The generation config, or None where the export has none."""
    if not (directory / "generation_config.json").is_file():
        return None
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:
        raise ArtifactError(
            f"{directory / 'generation_config.json'} can't be read: {error}", stage="load"
        ) from error
