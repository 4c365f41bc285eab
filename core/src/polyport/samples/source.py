"""Where a model comes from: a folder or the Hub, what its config.json says, and why it can't be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from polyport.errors import ExportError

#: What to do about GGUF files.
_GGUF = (
    "No exporter takes its quantized weights as they are: have them dequantized with `polyport export FOLDER --gguf-file "
    "NAME` (`load_model(folder, gguf_file=...)`), or export the original checkpoint."
)

#: A folder without config.json often is one of these: the file that tells, and what to do about it.
_OTHER_FOLDERS = {
    "export.json": "It is an export already: use `polyport run` or `polyport inspect` on it.",
    "adapter_config.json": "It is an adapter: merge it into its base model first (`model.merge_and_unload()` of peft).",
    "model_index.json": "It is a diffusers pipeline: export one of the models in its subfolders.",
}


@attrs.frozen
class Source:
    """Where a model comes from.

    Args:
        name: A folder, or the id of a repository on the Hub.
        revision: Branch, tag or commit on the Hub.
        token: Access token for the Hub; None for the one that was logged in with.
        trust_remote_code: Whether code from the repository may run.
        gguf_file: Name of the GGUF file in it that holds everything, in place of config.json, weights and tokenizer.
    """

    name: str
    revision: str | None = None
    token: str | None = None
    trust_remote_code: bool = False
    gguf_file: str | None = None

    @property
    def folder(self) -> Path | None:
        """The folder, if the source is one."""
        path = Path(self.name).expanduser()
        return path if path.is_dir() else None

    @property
    def location(self) -> str:
        """What transformers' `from_pretrained` methods take as their first argument."""
        return str(self.folder or self.name)

    def hub_options(self) -> dict[str, Any]:
        """Keyword arguments for the `from_pretrained` methods of transformers."""
        options: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        if self.revision is not None:
            options["revision"] = self.revision
        if self.token is not None:
            options["token"] = self.token
        if self.gguf_file is not None:
            options["gguf_file"] = self.gguf_file
        return options


def read_config(source: Source) -> dict[str, Any]:
    """The values of `config.json`, before any class makes something of them.

    Raises:
        ExportError: There is no such folder or repository, or no `config.json` in it.
    """
    from transformers import PreTrainedConfig

    check_source(source.name, source.gguf_file)
    options = {name: value for name, value in source.hub_options().items() if name != "trust_remote_code"}
    try:
        values, _ = PreTrainedConfig.get_config_dict(source.location, **options)
    except OSError as error:
        raise ExportError(_unreachable(source, error), stage="model") from error
    except ImportError as error:
        raise ExportError(
            f"{source.name} needs a package that is not installed: {error}", stage="model"
        ) from error
    except Exception as error:
        if source.gguf_file is None:
            raise
        raise ExportError(
            f"{source.gguf_file} is no GGUF file that can be read: {error}", stage="model"
        ) from error
    if not isinstance(values, dict) or not values:
        raise ExportError(f"The config.json of {source.name} is empty.", stage="model")
    return values


def check_source(path_or_id: str | Path, gguf_file: str | None = None) -> None:
    """Refuse what can be neither a model's folder nor a Hub id, without asking the network or importing anything.

    Args:
        path_or_id: The folder or id.
        gguf_file: Name of the GGUF file in it, where that stands for the others.

    Raises:
        ExportError: It is a file, a folder that doesn't exist or holds no `config.json` (no such GGUF file).
    """
    source = Source(str(path_or_id))
    path = Path(source.name).expanduser()
    if path.suffix == ".gguf":
        raise ExportError(f"{source.name} is a GGUF file. {_GGUF}", stage="model")
    if path.is_file():
        raise ExportError(
            f"{source.name} is a file. Give the folder that holds config.json and the weights.", stage="model"
        )
    looks_like_path = (
        source.name.startswith((".", "/", "~")) or "\\" in source.name or source.name.count("/") > 1
    )
    if source.folder is None and (looks_like_path or not source.name):
        raise ExportError(f"There is no folder {source.name!r}.", stage="model")
    if gguf_file is not None and source.folder is not None:
        if not (source.folder / gguf_file).is_file():
            found = ", ".join(sorted(path.name for path in source.folder.glob("*.gguf"))) or "none"
            raise ExportError(
                f"{source.folder} holds no {gguf_file}. Its GGUF files: {found}.", stage="model"
            )
        return
    if source.folder is not None and not (source.folder / "config.json").is_file():
        raise ExportError(f"{source.folder} holds no config.json. {_instead(source.folder)}", stage="model")


def _instead(folder: Path) -> str:
    """What the folder seems to be, and what to do."""
    for name, advice in _OTHER_FOLDERS.items():
        if (folder / name).is_file():
            return advice
    if any(folder.glob("*.gguf")):
        return f"It holds GGUF files. {_GGUF}"
    below = sorted(path.parent.name for path in folder.glob("*/config.json"))
    if below:
        return f"Its subfolders {', '.join(below)} do: give one of them."
    return "Give the folder that `model.save_pretrained` wrote."


def _unreachable(source: Source, error: OSError) -> str:
    """Why config.json could not be had, in one sentence, from what transformers chained."""
    from huggingface_hub import errors as hub

    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__

    def caused_by(*kinds: type[BaseException]) -> bool:
        return any(isinstance(one, kinds) for one in chain)

    if source.folder is not None:
        return f"The config.json of {source.name} can't be read: {error}"
    name = source.name
    if caused_by(hub.GatedRepoError):
        return f"{name} is gated on the Hub: accept its terms there and log in (`hf auth login`), or pass a token."
    if caused_by(hub.RevisionNotFoundError):
        return f"{name} has no revision {source.revision!r} on the Hub."
    if caused_by(hub.RepositoryNotFoundError):
        return f"There is no folder {name!r}, and no model of that name on the Hub that you have access to."
    if caused_by(hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled):
        return (
            f"There is no folder {name!r}, and the Hub can't be reached to look for a model of that name (none is in "
            "the local cache). Check the spelling, or the connection."
        )
    if caused_by(hub.EntryNotFoundError):
        return f"{name} on the Hub holds no config.json: it is no transformers checkpoint, or a GGUF-only repository."
    return f"There is no folder {name!r}, and it can't be fetched from the Hub: {str(error).splitlines()[0]}"


def refuse_quantized(source: Source, raw: dict[str, Any]) -> None:
    """Refuse checkpoints whose weights are quantized already.

    Raises:
        ExportError: They are; the message says what can be done.
    """
    quantized = raw.get("quantization_config")
    if quantized is None:
        return
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    raise ExportError(
        f"The weights of {source.name} are quantized already ({method or 'unknown method'}), in kernels that belong to one "
        "runtime and can't be traced. Export the original checkpoint and quantize in the export, or load it in Python, "
        "call `model.dequantize()` where its method has that, save it and export the result.",
        stage="model",
    )
