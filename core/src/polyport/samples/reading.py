"""Inputs that people give by hand: `name=value` pairs and files. Nothing here ever unpickles."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polyport.errors import InputError

#: Files of several inputs by suffix, for the error message.
_SUFFIXES = ".safetensors, .npz, .json"


def read_inputs(specs: Iterable[str] = (), file: str | Path | None = None) -> dict[str, Any]:
    """Read inputs from `name=value` pairs and a file.

    Args:
        specs: Pairs `name=value`. The value is JSON: a list of numbers becomes a tensor (int64, float32 or bool),
            a single number, `true`, `false` or `null` stays what it is (an option of the forward). `name=@file.npy`
            reads an array.
        file: A `.safetensors` or `.npz` file of arrays, or a `.json` object of lists. Pairs win over it.

    Returns:
        Name -> torch tensor or plain value.

    Raises:
        InputError: A pair or the file can't be read; the message says which and why.
    """
    values = {} if file is None else _read_file(Path(file))
    seen: set[str] = set()
    for spec in specs:
        name, separator, text = spec.partition("=")
        if not separator or not name:
            raise InputError(
                f"The input {spec!r} is no name=value pair, like input_ids=[[1,2,3]] or pixel_values=@file.npy.",
                stage="inputs",
            )
        if name in seen:
            raise InputError(f"The input {name!r} is given twice.", stage="inputs")
        seen.add(name)
        values[name] = _read_array(name, Path(text[1:])) if text.startswith("@") else _read_json(name, text)
    return values


def as_value(name: str, value: Any) -> Any:
    """A JSON value as an input: lists become tensors, plain values stay.

    Raises:
        InputError: The list is ragged or holds something else than numbers.
    """
    import torch

    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, list):
        try:
            return torch.tensor(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise InputError(
                f"The input {name!r} is no array of numbers ({error}). All rows must be of one length.",
                stage="inputs",
            ) from error
    kind = "text" if isinstance(value, str) else "an object"
    raise InputError(
        f"The input {name!r} is {kind}, where numbers are wanted. Text, pictures and sound go through the model's "
        "processor: --text, --image, --audio.",
        stage="inputs",
    )


def _read_json(name: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(
            f"The value of the input {name!r} is not JSON ({error}). Write lists as [[1, 2, 3]], read arrays with "
            f"{name}=@file.npy, and give text with --text.",
            stage="inputs",
        ) from error
    return as_value(name, value)


def _read_array(name: str, path: Path) -> Any:
    """One array from a `.npy` file, or one list from a `.json` file."""
    if path.suffix == ".json":
        return as_value(name, _load_json(path))
    if path.suffix != ".npy":
        raise InputError(
            f"The input {name!r} comes from {path}, which is no .npy or .json file.", stage="inputs"
        )
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(
            f"The input {name!r} can't be read from {path}: {_reason(error)}", stage="inputs"
        ) from error
    return _tensor(name, array)


def _read_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"There is no file {path} to read inputs from.", stage="inputs")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return {name: _tensor(name, arrays[name]) for name in arrays.files}
    except InputError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError, _safetensor_error()) as error:
        raise InputError(f"Inputs can't be read from {path}: {_reason(error)}", stage="inputs") from error
    if path.suffix == ".json":
        values = _load_json(path)
        if not isinstance(values, Mapping):
            raise InputError(
                f'{path} holds no JSON object of inputs, like {{"input_ids": [[1, 2]]}}.', stage="inputs"
            )
        return {name: as_value(name, value) for name, value in values.items()}
    raise InputError(f"{path} is no file that inputs are read from ({_SUFFIXES}).", stage="inputs")


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} can't be read as JSON: {_reason(error)}", stage="inputs") from error


def _tensor(name: str, array: np.ndarray) -> Any:
    import torch

    try:
        return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape).copy())
    except TypeError as error:
        raise InputError(
            f"The input {name!r} has the dtype {array.dtype}, which torch lacks.", stage="inputs"
        ) from error


def _safetensor_error() -> type[Exception]:
    from safetensors import SafetensorError

    error: type[Exception] = SafetensorError
    return error


def _reason(error: Exception) -> str:
    """The error in words; numpy's advice to allow pickles is not passed on."""
    if "allow_pickle" in str(error):
        return "it holds Python objects, not numbers, and reading those could run code."
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
