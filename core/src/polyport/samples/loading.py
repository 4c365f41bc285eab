"""Loading a model by folder or Hub id, with errors that say what is wrong with it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from polyport.errors import ConfigError, ExportError
from polyport.samples.source import Source, read_config, refuse_quantized
from polyport.samples.tasks import (
    auto_class,
    can_generate,
    class_names,
    classes_for,
    generating_tasks,
    task_of,
    tasks_of,
)

#: Spellings of the dtypes that weights may be loaded in.
DTYPES = {
    "float32": "float32", "fp32": "float32",
    "float16": "float16", "fp16": "float16",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
}  # fmt: skip


def load_model(
    path_or_id: str | Path,
    task: str | None = None,
    *,
    architecture: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    dtype: Any = None,
    generates: bool = False,
    gguf_file: str | None = None,
) -> tuple[Any, str | None]:
    """Load a `PreTrainedModel` for export.

    Args:
        path_or_id: A folder with `config.json` and weights, or the id of a repository on the Hub.
        task: What the model is wanted for (`"text-classification"`, `"causal-lm"`...); None for the class that the
            checkpoint was saved from.
        architecture: Name of the model class, in place of the one that the checkpoint names; not together with `task`.
        revision: Branch, tag or commit on the Hub.
        token: Access token for the Hub.
        trust_remote_code: Let code from the repository run, for architectures that transformers lacks.
        dtype: Type of the weights, `"float32"`, `"float16"`, `"bfloat16"` or a torch dtype; None for the checkpoint's.
        generates: Whether it is wanted for `generate`: a checkpoint that was saved without a head, whose weights are the
            embeddings', is then loaded with it.
        gguf_file: Name of a GGUF file in the folder or repository to load everything from; its weights are dequantized.

    Returns:
        The model in eval mode, and the name of its task (None where transformers lists its class under none).

    Raises:
        ExportError: There is no such model, it is no transformers checkpoint, its architecture or the task is unknown,
            its weights are missing or quantized, or it can't generate and is wanted for it. `ConfigError` for a `dtype`
            that is none.
    """
    source = Source(str(path_or_id), revision, token, trust_remote_code, gguf_file)
    wanted = torch_dtype(dtype)
    raw = read_config(source)
    if gguf_file is None:
        refuse_quantized(source, raw)
    config = _config(source, raw)
    cls = _model_class(source, raw, config, task, architecture)
    chosen = _generating_class(source, config, cls, task) if generates else cls
    model = _load_weights(chosen, source, config, wanted, complete=chosen is not cls)
    if gguf_file is not None:
        _forget_quantizer(model)
    return model, task or task_of(model)


def torch_dtype(dtype: Any) -> Any:
    """What `from_pretrained(dtype=...)` takes: `"auto"` for None, else the torch dtype.

    Raises:
        ConfigError: It is no type that weights are loaded in.
    """
    import torch

    if dtype is None or dtype == "auto":
        return "auto"
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ConfigError(
            f"There is no dtype {dtype!r} for weights. Valid: auto, {', '.join(DTYPES)}.", stage="model"
        )
    return getattr(torch, DTYPES[dtype])


def _config(source: Source, raw: dict[str, Any]) -> Any:
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(source.location, **source.hub_options())
    except (ValueError, KeyError) as error:
        kind = raw.get("model_type")
        if raw.get("auto_map") and not source.trust_remote_code:
            raise ExportError(
                f"The architecture of {source.name} (model_type {kind!r}) is code in its repository. If you trust that "
                "code, allow it with --trust-remote-code (trust_remote_code=True).",
                stage="model",
            ) from error
        known = kind in transformers.CONFIG_MAPPING if isinstance(kind, str) else False
        if known:
            raise ExportError(
                f"The config.json of {source.name} is not valid: {error}", stage="model"
            ) from error
        if kind is None:
            reason = "its config.json names no model_type"
        else:
            reason = f"transformers {transformers.__version__} has no model_type {kind!r}"
        raise ExportError(
            f"The architecture of {source.name} is unknown: {reason}.", stage="model"
        ) from error


def _model_class(
    source: Source, raw: dict[str, Any], config: Any, task: str | None, architecture: str | None
) -> Any:
    """The class whose `from_pretrained` is to be called."""
    import transformers

    if task is not None:
        return auto_class(task, config)
    names = [architecture] if architecture else raw.get("architectures") or []
    if source.gguf_file is not None and not names:
        return auto_class((generating_tasks(config) or ["feature-extraction"])[0], config)
    for name in names[:1]:
        cls = getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            if cls.config_class is not None and not isinstance(config, cls.config_class):
                raise ExportError(
                    f"{source.name} is a model of type {config.model_type!r}, which is none of the class {name}.",
                    stage="model",
                )
            return cls
        remote = raw.get("auto_map") or {}
        if source.trust_remote_code:
            for auto, reference in remote.items():
                if auto.startswith("AutoModel") and str(reference).endswith(f".{name}"):
                    return getattr(transformers, auto)
        raise ExportError(
            f"The class {name}, wanted for {source.name}, is not in transformers {transformers.__version__}. "
            f"Choose a head with --task: {', '.join(tasks_of(config)) or 'none is known'}.",
            stage="model",
        )
    return auto_class("feature-extraction", config)


def _generating_class(source: Source, config: Any, cls: Any, task: str | None) -> Any:
    """The class itself where it generates, else, for one without a head that nobody asked for, the one with it.

    Raises:
        ExportError: Neither does.
    """
    names = class_names(cls, config)
    if not names or any(can_generate(name) for name in names):
        return cls  # one that transformers doesn't list is code of the repository's own
    tasks = generating_tasks(config)
    if task is None and tasks and names[0] in classes_for("feature-extraction", config):
        return auto_class(tasks[0], config)
    other = (
        f" Its architecture does for the tasks {', '.join(tasks)}: choose one with --task." if tasks else ""
    )
    raise ExportError(
        f"{names[0]}, the class of {source.name}, can't generate: it makes no text token by token.{other} Leave out "
        "--generate to export its forward.",
        stage="model",
    )


def _load_weights(cls: Any, source: Source, config: Any, dtype: Any, *, complete: bool = False) -> Any:
    options = source.hub_options()
    if not cls.__name__.startswith("Auto"):
        options.pop("trust_remote_code")
    try:
        model, info = cls.from_pretrained(
            source.location, config=config, dtype=dtype, output_loading_info=True, **options
        )
    except ImportError as error:
        raise ExportError(
            f"{source.name} needs a package that is not installed: {error}", stage="model"
        ) from error
    except OSError as error:
        first = str(error).strip().splitlines()[0]
        raise ExportError(
            f"The weights of {source.name} are missing or can't be read: {first}", stage="model"
        ) from error
    except Exception as error:
        raise ExportError(
            f"The weights of {source.name} could not be loaded into {cls.__name__}: {type(error).__name__}: {error}",
            stage="model",
        ) from error
    missing = sorted(info["missing_keys"])
    if missing and not _any_loaded(model, missing):
        raise ExportError(
            f"None of the weights of {type(model).__name__} are in the checkpoint of {source.name}: it holds another "
            "model's.",
            stage="model",
        )
    if missing:
        shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        if complete:
            raise ExportError(
                f"{source.name} can't generate as {type(model).__name__}: its checkpoint has no weights for {shown}.",
                stage="model",
            )
        warnings.warn(
            f"The checkpoint of {source.name} has no weights for {shown}: the export will hold random values there. "
            "Outputs that depend on them mean nothing.",
            UserWarning,
            stacklevel=3,
        )
    return model.eval()


def _forget_quantizer(model: Any) -> None:
    """Make a model of what was loaded from a GGUF file: its weights are plain numbers, but transformers marks it as quantized."""
    model.hf_quantizer = None
    model.is_quantized = False
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "quantization_config"):
            del config.quantization_config


def _any_loaded(model: Any, missing: list[str]) -> bool:
    return not {name for name, _ in model.named_parameters()} <= set(missing)
