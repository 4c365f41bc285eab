"""Loading a model by folder or Hub id, with errors that say what is wrong with it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from polyport.errors import ConfigError, ExportError
from polyport.samples.source import Source, read_config, refuse_quantized
from polyport.samples.tasks import auto_class, task_of, tasks_of

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

    Returns:
        The model in eval mode, and the name of its task (None where transformers lists its class under none).

    Raises:
        ExportError: There is no such model, it is no transformers checkpoint, its architecture or the task is unknown,
            its weights are missing or quantized. `ConfigError` for a `dtype` that is none.
    """
    source = Source(str(path_or_id), revision, token, trust_remote_code)
    wanted = torch_dtype(dtype)
    raw = read_config(source)
    refuse_quantized(source, raw)
    config = _config(source, raw)
    model = _load_weights(_model_class(source, raw, config, task, architecture), source, config, wanted)
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


def _load_weights(cls: Any, source: Source, config: Any, dtype: Any) -> Any:
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
        warnings.warn(
            f"The checkpoint of {source.name} has no weights for {shown}: the export will hold random values there. "
            "Outputs that depend on them mean nothing.",
            UserWarning,
            stacklevel=3,
        )
    return model.eval()


def _any_loaded(model: Any, missing: list[str]) -> bool:
    return not {name for name, _ in model.named_parameters()} <= set(missing)
