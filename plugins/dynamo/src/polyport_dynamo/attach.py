"""Putting weights from a common file into a program that was saved without them.

What an archive says about its weights is data from a stranger: a key or a view that doesn't fit is refused before anything is
computed with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.export.graph_signature import InputKind

from polyport.errors import ArtifactError
from polyport_dynamo.mapped import WeightsFile, open_weights

_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def attach(program: torch.export.ExportedProgram, text: str, files: Sequence[Path]) -> None:
    """Put the weights in the places of the empty tensors.

    Args:
        program: The program, as read from its archive; changed in place.
        text: What the archive's extra file says (see `polyport_dynamo.shared`); empty where it has none.
        files: The files that the component came with.

    Raises:
        ArtifactError: The file or a weight is missing, or they don't fit the program.
    """
    places = _fill(program, text, files) if text else {}
    for name, like in _lifted(program):
        held = program.state_dict.get(name, program.constants.get(name))
        if not isinstance(held, torch.Tensor) or (held.numel() == 0 and 0 not in like.shape):
            raise _refused(f"{name!r} is missing, where the graph takes {like.dtype} {list(like.shape)}")
        if name in places and (held.dtype != like.dtype or tuple(held.shape) != _sizes(like)):
            raise _refused(
                f"{name!r} is {held.dtype} {list(held.shape)}, where the graph takes {like.dtype} {list(like.shape)}"
            )


def _fill(program: torch.export.ExportedProgram, text: str, files: Sequence[Path]) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
        version, file, places = document["version"], document["file"], dict(document["weights"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _refused(f"the list of its weights can't be read ({type(error).__name__}: {error})") from error
    if version != 1:
        raise _refused(f"its list of weights has the version {version!r}; this polyport reads 1")
    # a list can't lead anywhere: it names one of the files that the manifest names
    path = next((path for path in files if path.name == file), None)
    if path is None:
        raise _refused(f"its weights are in {file!r}, which is none of its files")
    weights = open_weights(path, program)
    for name, place in places.items():
        home = program.state_dict if name in program.state_dict else program.constants
        empty = home.get(name)
        if not isinstance(empty, torch.Tensor) or empty.shape != (0,):
            raise _refused(f"{name!r} has no empty place in the program")
        tensor = _found(weights, name, place)
        if tensor.dtype != empty.dtype:
            raise _refused(f"{name!r} is {tensor.dtype} in {path.name}, not {empty.dtype}")
        parameter = isinstance(empty, torch.nn.Parameter)
        found = torch.nn.Parameter(tensor, not place.get("frozen")) if parameter else tensor
        home[name] = found if found.device == empty.device else weights.on(empty.device, found)
    return places


def _found(weights: WeightsFile, name: str, place: Any) -> torch.Tensor:
    if not isinstance(place, dict) or not isinstance(key := place.get("key"), str):
        raise _refused(f"the place of {name!r} is given as {place!r}")
    if key not in weights.keys:
        raise _refused(f"{weights.path.name} lacks {key!r}")
    tensor = weights.tensor(key)
    if "shape" not in place:
        return tensor
    view = cast("Any", place)  # checked below
    shape, stride, offset = view["shape"], view.get("stride"), view.get("offset")
    if not (
        _counts(shape)
        and _counts(stride)
        and _counts([offset])
        and tensor.dim() == 1
        and len(shape) == len(stride)
        and 0 not in shape
        and offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) < tensor.numel()
    ):
        raise _refused(f"{name!r} reaches out of {key!r} in {weights.path.name}")
    return tensor.as_strided(shape, stride, tensor.storage_offset() + offset)


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _lifted(program: torch.export.ExportedProgram) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that the graph takes, each with a fake tensor like it."""
    placeholders = program.graph.find_nodes(op="placeholder")
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
        like = node.meta.get("val")
        if spec.kind in _KINDS and spec.target and isinstance(like, torch.Tensor):
            yield spec.target, like


def _sizes(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The shape, with something that equals no number in place of a size that isn't fixed."""
    return tuple(size if type(size) is int else None for size in tensor.shape)


def _refused(what: str) -> ArtifactError:
    return ArtifactError(
        f"The program and its weights don't belong together: {what}.", stage="load", backend="dynamo"
    )
