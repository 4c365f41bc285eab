"""Something to read, to look at and to listen to: the built-in samples, the same on every machine.

Real models answer structure, so a picture has areas, edges and colours and a sound has pitch; noise would leave most
activations of a trained network near what they are for nothing at all.
"""

from __future__ import annotations

import importlib.util
import wave
from pathlib import Path
from typing import Any

import numpy as np

from polyport.errors import InputError

#: The built-in text.
TEXT = "Hello, world! This sentence was written to try a model out."


def picture(height: int = 240, width: int = 320) -> np.ndarray:
    """A landscape of sorts: a sky that fades, a sun, a house and a striped field.

    Args:
        height: Height in pixels.
        width: Width in pixels.

    Returns:
        uint8 array [height, width, 3], RGB.
    """
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    v, u = y / height, x / width
    image = np.stack([90 + 120 * v, 140 + 70 * v, 235 - 40 * v], axis=-1)
    field = v > 0.65
    stripes = 25 * np.sign(np.sin(40 * u + 6 * v))
    image[field] = np.stack([60 + stripes, 140 + stripes, 50 + stripes], axis=-1)[field]
    image[(u - 0.8) ** 2 + (0.75 * (v - 0.2)) ** 2 < 0.008] = (255, 220, 90)
    image[(np.abs(u - 0.35) < 0.15) & (np.abs(v - 0.58) < 0.14)] = (170, 70, 50)
    image[(np.abs(u - 0.35) < 2.2 * (v - 0.355)) & (np.abs(v - 0.4) < 0.045)] = (80, 45, 40)
    picture: np.ndarray = np.clip(image, 0, 255).astype(np.uint8)
    return picture


def chirp(sampling_rate: int = 16_000, seconds: float = 1.0) -> np.ndarray:
    """A tone that rises from 150 Hz to 1.5 kHz, faded in and out.

    Args:
        sampling_rate: Samples a second.
        seconds: Length.

    Returns:
        float32 array [sampling_rate * seconds], within -0.5 and 0.5.
    """
    time = np.arange(int(sampling_rate * seconds)) / sampling_rate
    phase = 2 * np.pi * (150 * time + (1500 - 150) * time**2 / (2 * seconds))
    fade = np.minimum(1, 20 * np.minimum(time, seconds - time) / seconds)
    return (0.5 * fade * np.sin(phase)).astype(np.float32)


def as_image(array: np.ndarray) -> Any:
    """The array as a `PIL.Image` where Pillow is installed, since some processors take nothing else."""
    if importlib.util.find_spec("PIL") is None:
        return array
    from PIL import Image

    return Image.fromarray(array)


def read_image(path: Path) -> Any:
    """Read a picture from a file.

    Raises:
        InputError: The file is missing or no picture, or Pillow is not installed.
    """
    if importlib.util.find_spec("PIL") is None:
        raise InputError("Reading pictures needs Pillow: `pip install pillow`.", stage="inputs")
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"The picture {path} can't be read: {reason}", stage="inputs") from error


def read_audio(path: Path, sampling_rate: int) -> np.ndarray:
    """Read a sound from a file, mixed to one channel and resampled.

    WAV files with whole-number samples are read with the standard library; anything else needs `soundfile`.

    Args:
        path: The file.
        sampling_rate: Samples a second that the model takes.

    Returns:
        float32 array [samples].

    Raises:
        InputError: The file is missing, no sound, or of a kind that needs `soundfile`.
    """
    try:
        samples, rate = _read_wav(path)
    except (wave.Error, EOFError, ValueError) as error:
        if importlib.util.find_spec("soundfile") is None:
            raise InputError(
                f"The sound {path} is no WAV file that can be read without help ({error}): convert it to 16-bit WAV or "
                "`pip install soundfile`.",
                stage="inputs",
            ) from error
        samples, rate = _read_soundfile(path)
    except OSError as error:
        raise InputError(
            f"The sound {path} can't be read: {error.strerror or error}", stage="inputs"
        ) from error
    if samples.size == 0:
        raise InputError(f"The sound {path} is empty.", stage="inputs")
    return _resample(samples.mean(axis=1), rate, sampling_rate)


def _read_wav(path: Path) -> tuple[np.ndarray, int]:
    """Samples [frames, channels] between -1 and 1, and the sampling rate."""
    with wave.open(str(path), "rb") as file:
        channels, width, rate, frames = file.getparams()[:4]
        data = np.frombuffer(file.readframes(frames), dtype=np.uint8)
    data = data[: len(data) // (width * channels) * width * channels].reshape(-1, channels, width)
    if width == 1:  # 8-bit WAV is unsigned, every wider one signed and little-endian
        return (data[..., 0].astype(np.float32) - 128) / 128, rate
    padded = np.zeros((*data.shape[:2], 4), dtype=np.uint8)
    padded[..., 4 - width :] = data
    return padded.view("<i4")[..., 0].astype(np.float32) / 2**31, rate


def _read_soundfile(path: Path) -> tuple[np.ndarray, int]:
    import soundfile  # type: ignore[import-not-found]

    try:
        samples, rate = soundfile.read(str(path), dtype="float32", always_2d=True)
    except (RuntimeError, OSError) as error:
        raise InputError(f"The sound {path} can't be read: {error}", stage="inputs") from error
    return samples, int(rate)


def _resample(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Band-limited resampling through the spectrum, as `scipy.signal.resample` does it."""
    if rate == wanted:
        return samples.astype(np.float32)
    count = max(1, round(len(samples) * wanted / rate))
    spectrum = np.fft.rfft(samples)
    resized = np.zeros(count // 2 + 1, dtype=spectrum.dtype)
    kept = min(len(spectrum), len(resized))
    resized[:kept] = spectrum[:kept]
    return (np.fft.irfft(resized, n=count) * (count / len(samples))).astype(np.float32)
