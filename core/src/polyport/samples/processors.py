"""A model's own tokenizer, image processor, feature extractor or processor: loading them, and calling them alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from polyport.errors import ExportError, InputError
from polyport.samples.source import Source

#: Files that a tokenizer is in. Asked for first: transformers makes an empty tokenizer where there is none of them.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model",
    "tokenizer.model", "source.spm",
)  # fmt: skip
_PROCESSOR_FILES = ("processor_config.json",)
_PREPROCESSOR_FILES = ("preprocessor_config.json",)


@attrs.frozen(kw_only=True)
class Processors:
    """What turns text, pictures and sound into a model's inputs.

    Args:
        whole: The processor that unites the others, where the model has one.
        tokenizer: Takes text.
        image_processor: Takes pictures.
        feature_extractor: Takes sound.
    """

    whole: Any = None
    tokenizer: Any = None
    image_processor: Any = None
    feature_extractor: Any = None

    @property
    def parts(self) -> tuple[Any, ...]:
        """What has to be saved so that `load_processors` finds the same again."""
        if self.whole is not None:
            return (self.whole,)
        candidates = (self.tokenizer, self.image_processor, self.feature_extractor)
        return tuple(part for part in candidates if part is not None)

    def single(self) -> Any:
        """The one object there is (a tokenizer, a processor...), this set where there are several, None for none."""
        return self.parts[0] if len(self.parts) == 1 else self if self.parts else None

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the files of every part into a folder."""
        for part in self.parts:
            part.save_pretrained(str(directory))

    @property
    def sampling_rate(self) -> int:
        """Samples of sound a second that the feature extractor takes; 16000 where it doesn't say."""
        return int(getattr(self.feature_extractor, "sampling_rate", None) or 16_000)

    def __call__(
        self, *, text: Sequence[str] = (), images: Sequence[Any] = (), audio: Sequence[Any] = ()
    ) -> dict[str, Any]:
        """Make inputs of raw text, pictures and sounds; one batch row for each of them.

        Args:
            text: Sentences.
            images: Pictures, as `PIL.Image` or uint8 arrays [height, width, 3].
            audio: Sounds, float arrays [samples] at `sampling_rate`.

        Returns:
            Forward kwargs as torch tensors.

        Raises:
            InputError: There is nothing here that takes one of them, or it refuses.
        """
        for given, part, kind in (
            (text, self.tokenizer, "text"),
            (images, self.image_processor, "pictures"),
            (audio, self.feature_extractor, "sound"),
        ):
            if given and part is None:
                raise InputError(
                    f"There is nothing here that turns {kind} into inputs. Give the tensors themselves with --input or "
                    "--inputs.",
                    stage="inputs",
                )
        try:
            return as_tensors(self._call(list(text), list(images), list(audio)))
        except Exception as error:
            raise InputError(
                f"The model's {type(self.parts[0]).__name__} can't make inputs of this: {error}",
                stage="inputs",
            ) from error

    def _call(self, text: list[str], images: list[Any], audio: list[Any]) -> Mapping[str, Any]:
        rate = {"sampling_rate": self.sampling_rate}
        if self.whole is not None and (text or len(self.parts) == 1):
            kwargs: dict[str, Any] = {"return_tensors": "pt"}
            if text:
                kwargs["text"] = self._prompts(text, len(images), len(audio))
                kwargs["padding"] = len(text) > 1
            if images:
                kwargs["images"] = images
            if audio:
                kwargs |= {"audio": audio} | rate
            called: Mapping[str, Any] = self.whole(**kwargs)
            return called
        inputs: dict[str, Any] = {}
        if text:
            inputs |= self.tokenizer(text, return_tensors="pt", padding=len(text) > 1)
        if images:
            inputs |= self.image_processor(images=images, return_tensors="pt")
        if audio:
            inputs |= self.feature_extractor(audio, return_tensors="pt", **rate)
        return inputs

    def _prompts(self, text: list[str], images: int, audio: int) -> list[str]:
        """The texts with the processor's own placeholders for the pictures and sounds that come with them."""
        counts = {kind: count // len(text) for kind, count in (("image", images), ("audio", audio)) if count}
        tokens = {kind: getattr(self.whole, f"{kind}_token", None) for kind in counts}
        wanted = {kind: str(token) for kind, token in tokens.items() if token}
        return [self._prompt(one, counts, wanted) for one in text]

    def _prompt(self, text: str, counts: Mapping[str, int], tokens: Mapping[str, str]) -> str:
        if not tokens or any(token in text for token in tokens.values()):
            return text
        if getattr(self.whole, "chat_template", None):
            content = [{"type": kind} for kind in tokens for _ in range(counts[kind])]
            chat = [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
            prompt: str = self.whole.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            if all(token in prompt for token in tokens.values()):
                return prompt
        return "".join(token * counts[kind] for kind, token in tokens.items()) + text


def load_processors(
    path_or_id: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
) -> Processors:
    """Load what a folder or a repository on the Hub has of tokenizer, image processor and feature extractor.

    Args:
        path_or_id: A model's folder, an export's, or the id of a repository on the Hub.
        revision: Branch, tag or commit on the Hub.
        token: Access token for the Hub.
        trust_remote_code: Let code from the repository run.
        gguf_file: Name of the GGUF file in it that holds the tokenizer.

    Returns:
        What was found; empty (`single()` is None) where there are no such files.

    Raises:
        ExportError: There are files but nothing could be loaded from them, a missing package for example.
    """
    import transformers

    source = Source(str(path_or_id), revision, token, trust_remote_code, gguf_file)
    if gguf_file is not None:
        return Processors(tokenizer=_from_gguf(source))
    has_tokenizer = _has(source, _TOKENIZER_FILES)
    has_processor = _has(source, _PROCESSOR_FILES)
    has_preprocessor = has_processor or _has(source, _PREPROCESSOR_FILES)
    failures: list[str] = []

    def attempt(auto: Any) -> Any:
        try:
            return auto.from_pretrained(source.location, **source.hub_options())
        except Exception as error:  # noqa: BLE001 - each class fails in its own ways; reported below if all do
            failures.append(
                f"{auto.__name__}: {str(error).strip().splitlines()[0] if str(error) else error!r}"
            )
            return None

    # a processor class is known for many models whose repository lacks half of the files it needs
    if has_processor or (has_tokenizer and has_preprocessor):
        found = attempt(transformers.AutoProcessor)
        if isinstance(found, transformers.ProcessorMixin):
            return Processors(
                whole=found,
                tokenizer=getattr(found, "tokenizer", None) if has_tokenizer else None,
                image_processor=getattr(found, "image_processor", None),
                feature_extractor=getattr(found, "feature_extractor", None),
            )
    tokenizer = attempt(transformers.AutoTokenizer) if has_tokenizer else None
    images = attempt(transformers.AutoImageProcessor) if has_preprocessor else None
    sound = attempt(transformers.AutoFeatureExtractor) if has_preprocessor and images is None else None
    processors = Processors(tokenizer=tokenizer, image_processor=images, feature_extractor=sound)
    if failures and not processors.parts:
        raise ExportError(
            f"The tokenizer or processor of {source.name} can't be loaded ({'; '.join(failures)}).",
            stage="inputs",
        )
    return processors


def _from_gguf(source: Source) -> Any:
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(source.location, **source.hub_options())
    except Exception as error:
        raise ExportError(
            f"The tokenizer in {source.gguf_file} can't be read: {error}", stage="inputs"
        ) from error


def _has(source: Source, names: Sequence[str]) -> bool:
    """Whether the source holds one of the files."""
    if source.folder is not None:
        return any((source.folder / name).is_file() for name in names)
    from transformers.utils import cached_file

    options = {name: value for name, value in source.hub_options().items() if name != "trust_remote_code"}
    quiet = {
        "_raise_exceptions_for_gated_repo": False,
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    return any(cached_file(source.name, name, **options, **quiet) is not None for name in names)


def as_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are tensors or can be made into one; the others tell people things, not models."""
    import torch

    tensors: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
            continue
        try:
            tensors[name] = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            continue
    return tensors
