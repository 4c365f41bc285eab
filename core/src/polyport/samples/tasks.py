"""Names of tasks, and the auto classes of transformers that stand for them.

Every `AutoModelFor...` of the installed transformers is a task under its own name (`AutoModelForCausalLM` is
`causal-lm`). The table below adds the names that people know from transformers' pipelines and from the model pages of
the Hub, where these differ. Nothing here knows a model by name.
"""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from typing import Any

from polyport.errors import ExportError

#: Name of a task -> auto classes, the preferred one first.
_WELL_KNOWN: dict[str, tuple[str, ...]] = {
    "feature-extraction": ("AutoModel",),
    "image-text-to-text": ("AutoModelForImageTextToText", "AutoModelForMultimodalLM"),
    "automatic-speech-recognition": ("AutoModelForSpeechSeq2Seq", "AutoModelForCTC"),
    "text-generation": ("AutoModelForCausalLM",),
    "text2text-generation": ("AutoModelForSeq2SeqLM",),
    "text-classification": ("AutoModelForSequenceClassification",),
    "token-classification": ("AutoModelForTokenClassification",),
    "question-answering": ("AutoModelForQuestionAnswering",),
    "multiple-choice": ("AutoModelForMultipleChoice",),
    "fill-mask": ("AutoModelForMaskedLM",),
    "image-classification": ("AutoModelForImageClassification",),
    "image-segmentation": (
        "AutoModelForImageSegmentation",
        "AutoModelForSemanticSegmentation",
        "AutoModelForUniversalSegmentation",
    ),
    "text-to-audio": ("AutoModelForTextToWaveform", "AutoModelForTextToSpectrogram"),
}

#: Other names for the same.
_ALIASES = {
    "sentiment-analysis": "text-classification",
    "ner": "token-classification",
    "sentence-similarity": "feature-extraction",
    "image-feature-extraction": "feature-extraction",
    "summarization": "text2text-generation",
    "translation": "text2text-generation",
    "text-to-speech": "text-to-audio",
}

#: What models generate for. Many that see, hear or read have a decoder of their own that is listed for plain text, too.
_GENERATING = (
    "image-text-to-text",
    "automatic-speech-recognition",
    "text2text-generation",
    "text-generation",
)

# CausalLM -> Causal, LM; Seq2SeqLM -> Seq2Seq, LM
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z](?:[a-z]|\d[A-Z]?)*")


@lru_cache(maxsize=1)
def tasks() -> dict[str, tuple[str, ...]]:
    """Every task by name, with the names of its auto classes; the well-known names come first."""
    from transformers.models.auto import modeling_auto

    found = {
        name: classes
        for name, classes in _WELL_KNOWN.items()
        if any(hasattr(modeling_auto, c) for c in classes)
    }
    for name in vars(modeling_auto):
        if name.startswith("AutoModelFor") and hasattr(getattr(modeling_auto, name), "_model_mapping"):
            found.setdefault("-".join(_WORDS.findall(name.removeprefix("AutoModelFor"))).lower(), (name,))
    return found


def auto_class(task: str, config: Any) -> Any:
    """The auto class that loads a model of this config for a task.

    Args:
        task: Name of a task.
        config: The model's config.

    Returns:
        A class of transformers with `from_pretrained`.

    Raises:
        ExportError: No such task (the message lists the valid names), or the model has no head for it (the message
            lists the ones it has).
    """
    import transformers

    name = _ALIASES.get(task, task)
    classes = tasks().get(name)
    if classes is None:
        valid = sorted({*tasks(), *_ALIASES})
        near = difflib.get_close_matches(task, valid, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ExportError(f"There is no task {task!r}.{hint} Valid tasks: {', '.join(valid)}.", stage="model")
    for class_name in classes:
        auto = getattr(transformers, class_name, None)
        if auto is not None and type(config) in auto._model_mapping:
            return auto
    raise ExportError(
        f"Models of type {config.model_type!r} have no head for the task {task!r} in transformers "
        f"{transformers.__version__}. They have: {', '.join(tasks_of(config)) or 'none'}.",
        stage="model",
    )


def tasks_of(config: Any) -> list[str]:
    """Names of the tasks that models of this config have a class for, the well-known names first."""
    return [name for name, _ in _classes_of(config)]


def task_of(model: Any) -> str | None:
    """Name of the task a model's class is made for; None where transformers lists it under none."""
    for name, classes in _classes_of(model.config):
        # mixtures of tasks: a class listed for pretraining says nothing about what it is used for
        if name != "pre-training" and type(model).__name__ in classes:
            return name
    return None


def generating_tasks(config: Any) -> list[str]:
    """Names of the tasks for which models of this config generate, the one that says most about them first."""
    found: dict[str, list[str]] = {}
    for name, classes in _classes_of(config):
        # some tasks have two names
        if name != "pre-training" and any(map(can_generate, classes)) and classes not in found.values():
            found[name] = classes
    return sorted(
        found, key=lambda name: _GENERATING.index(name) if name in _GENERATING else len(_GENERATING)
    )


def can_generate(name: str) -> bool:
    """Whether the model class of that name in transformers has `generate`."""
    import transformers

    asked = getattr(getattr(transformers, name, None), "can_generate", None)
    return asked is not None and bool(asked())


def classes_for(task: str, config: Any) -> list[str]:
    """Names of the model classes that transformers has for a task and a config; none where it has none."""
    return dict(_classes_of(config)).get(task, [])


def class_names(cls: Any, config: Any) -> list[str]:
    """Names of the model classes that a class stands for: of those that an auto class has for the config, else its own."""
    mapping = getattr(cls, "_model_mapping", None)
    if mapping is None:
        return [cls.__name__]
    if type(config) not in mapping:
        return []
    entry = mapping[type(config)]
    return [one.__name__ for one in (entry if isinstance(entry, (tuple, list)) else (entry,))]


def _classes_of(config: Any) -> list[tuple[str, list[str]]]:
    """Task -> names of the model classes that transformers has for the config, tasks without any left out."""
    import transformers

    found = []
    for name, autos in tasks().items():
        names: list[str] = []
        for auto in autos:
            cls = getattr(transformers, auto, None)
            names += class_names(cls, config) if cls is not None else []
        if names:
            found.append((name, names))
    return found
