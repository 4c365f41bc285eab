"""Sample inputs for a model that comes without tokenizer or processor: from its config and its forward signature.

What decides is which inputs the model's forward takes and which sizes its config names, never which model it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np

from polyport.errors import ExportError
from polyport.samples.media import chirp, picture

#: Tokens of the sample text, and samples of the sample sound.
_TOKENS, _SOUND = 12, 16_000

#: Height and width where the config names none: convolutional models take any, and most were trained at this one.
_IMAGE_SIZE = 224

#: Config fields that give the id of a token which stands for something else than text.
_PLACEHOLDERS = (
    "image_token_id",
    "image_token_index",
    "audio_token_id",
    "audio_token_index",
    "video_token_id",
)


def inputs_from_config(model: Any, task: str | None = None) -> dict[str, Any]:
    """Make sample inputs of batch 1 for a model.

    Args:
        model: A `PreTrainedModel`.
        task: Name of its task, where known.

    Returns:
        Forward kwargs, float32 and int64 tensors on the CPU.

    Raises:
        ExportError: The config doesn't say what the model needs.
    """
    takes = inspect.signature(model.forward).parameters
    config = model.config
    inputs: dict[str, Any] = {}
    if "input_ids" in takes:
        if any(_find(config, name) is not None for name in _PLACEHOLDERS):
            raise _missing(
                model, "the placeholders that tie its text to pictures or sound are its processor's business"
            )
        inputs |= _text(config, "attention_mask" in takes)
        if task == "multiple-choice":
            inputs = {name: value[:, None].repeat(1, 2, 1) for name, value in inputs.items()}
    if "pixel_values_videos" in takes and "pixel_values" not in takes:
        inputs["pixel_values_videos"] = _video(config)
    elif "pixel_values" in takes:
        only_video = _modalities(model) == {"video"}
        inputs["pixel_values"] = _video(config) if only_video else _image(config)
    if "input_features" in takes:
        inputs["input_features"] = _features(model)
    elif "input_values" in takes:
        inputs["input_values"] = _sound(config)
    if not inputs:
        inputs = _own_dummies(model)
    needed = [name for name, parameter in takes.items() if _required(parameter)]
    main = model.main_input_name
    needed += [main] if isinstance(main, str) else list(main)
    absent = [name for name in needed if name not in inputs and name != "inputs_embeds"]
    if absent:
        raise _missing(model, f"its config doesn't say how {', '.join(dict.fromkeys(absent))} look")
    return inputs


def token_ids(config: Any, count: int) -> Any:
    """Ordinary token ids, spread over the vocabulary, with the end token last where the config names one.

    Args:
        config: A config with a vocabulary.
        count: Number of tokens.

    Returns:
        int64 tensor [1, count].
    """
    import torch

    text = config.get_text_config()
    vocabulary = int(getattr(text, "vocab_size", 0) or _find(config, "vocab_size") or 0)
    special = set(special_ids(config))
    ordinary = [i for i in range(vocabulary) if i not in special] or [0]
    ids = [ordinary[(7 + 31 * k * max(1, len(ordinary) // 211)) % len(ordinary)] for k in range(count)]
    end = _first(getattr(text, "eos_token_id", None))
    # classifiers on top of encoder-decoder models read the state of the end token, and fail without one
    if end is not None and 0 <= end < vocabulary:
        ids[-1] = end
    return torch.tensor([ids])


def special_ids(config: Any) -> Iterator[int]:
    """Ids of the tokens that stand for something else than text, of the config and all below it."""
    for part in _parts(config):
        for name, value in vars(part).items():
            if name.endswith(("_token_id", "_token_index")):
                yield from (
                    i for i in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(i, int)
                )


def _text(config: Any, mask: bool) -> dict[str, Any]:
    import torch

    longest = _find(config, "max_position_embeddings", "n_positions")
    ids = token_ids(config, min(_TOKENS, int(longest) - 2) if longest and int(longest) > 4 else _TOKENS)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if mask else {"input_ids": ids}


def _image(config: Any) -> Any:
    import torch

    height, width = _image_size(config)
    channels = _channels(config)
    pixels = picture(height, width).astype(np.float32) / 127.5 - 1
    layers = [pixels[..., k % 3] for k in range(channels)]
    return torch.from_numpy(np.stack(layers)[None])


def _video(config: Any) -> Any:
    import torch

    frames = int(_find(config, "num_frames", "frames_per_clip") or 8)
    # the same scene, moving to the left
    return torch.stack([_image(config).roll(-4 * k, dims=-1) for k in range(frames)], dim=1)


def _image_size(config: Any) -> tuple[int, int]:
    size = _find(config, "image_size", "input_size", "crop_size")
    if isinstance(size, dict):
        size = (size.get("height"), size.get("width"))
    if isinstance(size, (list, tuple)) and len(size) >= 2:
        return int(size[-2]), int(size[-1])
    one = _first(size)
    return (int(one), int(one)) if one else (_IMAGE_SIZE, _IMAGE_SIZE)


def _channels(config: Any) -> int:
    return int(_first(_find(config, "num_channels", "in_channels", "in_chans", "num_input_channels")) or 3)


def _sound(config: Any) -> Any:
    import torch

    bins, length = _find(config, "num_mel_bins"), _find(config, "max_length")
    if bins and length and _find(config, "frequency_stride") is not None:
        return _spectrogram(int(length), int(bins))
    wave = torch.from_numpy(chirp(_find(config, "sampling_rate") or _SOUND)[:_SOUND])
    channels = _find(config, "audio_channels")
    return wave.expand(1, int(channels), -1).contiguous() if channels else wave[None]


def _features(model: Any) -> Any:
    """Features of sound: as wide as the config says, in the orientation its fields tell of."""
    config = model.config
    longest, bins = _find(config, "max_source_positions"), _find(config, "num_mel_bins")
    width = _find(config, "input_feat_per_channel", "feature_projection_input_dim")
    if width:
        return _spectrogram(100, int(width))
    if bins and longest:
        # a fixed window, halved by the first convolution
        return _spectrogram(2 * int(longest), int(bins)).transpose(1, 2).contiguous()
    if bins:
        return _spectrogram(100, int(bins))
    raise _missing(model, "its config doesn't say how wide its input_features are")


def _spectrogram(frames: int, bins: int) -> Any:
    """A rising band of energy with its overtone: [1, frames, bins], about zero mean and unit variance."""
    import torch

    time, pitch = np.mgrid[0:frames, 0:bins].astype(np.float32)
    band = time / frames * 0.45 + 0.05
    energy = sum(np.exp(-((pitch / bins - k * band) ** 2) / 0.002) for k in (1, 2)) + 0.05 * np.cos(time / 7)
    return torch.from_numpy(((energy - energy.mean()) / energy.std()).astype(np.float32)[None])


def _own_dummies(model: Any) -> dict[str, Any]:
    """The dummy inputs that the model's class defines, where it does: the inherited ones are arbitrary token ids."""
    from transformers import PreTrainedModel

    if type(model).dummy_inputs is PreTrainedModel.dummy_inputs:
        return {}
    try:
        return dict(model.dummy_inputs)
    except Exception as error:
        raise _missing(model, f"its own dummy inputs fail ({error})") from error


def _required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return parameter.default is inspect.Parameter.empty and not variadic


def _modalities(model: Any) -> set[str]:
    given = getattr(model, "input_modalities", ())
    return {given} if isinstance(given, str) else set(given)


def _parts(config: Any) -> Iterator[Any]:
    """The config and the ones inside it, nearest first."""
    from transformers import PreTrainedConfig

    level = [config]
    while level:
        yield from level
        level = [v for part in level for v in vars(part).values() if isinstance(v, PreTrainedConfig)]


def _find(config: Any, *names: str) -> Any:
    """The first of these fields that the config, or one inside it, has a value for."""
    for part in _parts(config):
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return None


def _first(value: Any) -> Any:
    return (value[0] if value else None) if isinstance(value, (list, tuple)) else value


def _missing(model: Any, why: str) -> ExportError:
    return ExportError(
        f"No sample inputs can be made for {type(model).__name__}: there is no processor for it here, and {why}. Give "
        "inputs with --input name=value or --inputs file.",
        stage="inputs",
    )
