"""Weight files: every content written once, whichever graphs and initializers it belongs to, and mapped once."""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

#: Weights up to this size (bytes) stay inside the graph file: shape operands, small biases and scalars.
INLINE = 1024

#: Offsets of weights above a size (both in bytes), as ONNX Runtime wants them to map a file.
_ALIGNMENT, _ALIGNED_ABOVE = 4096, 2**20

#: Bytes that are compared before whole weights are: enough to tell any two trained ones apart.
_SAMPLED = 256


def initializers(model: ir.Model) -> Iterator[ir.Value]:
    """The weights of a model, those inside branches, loops and functions too."""
    yield from model.graph.initializers.values()
    graphs: list[Any] = [model.graph, *model.functions.values()]
    for graph in graphs:
        for node in ir.traversal.RecursiveGraphIterator(graph):
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    yield from attribute.value.initializers.values()
                elif attribute.type == ir.AttributeType.GRAPHS:
                    for inner in attribute.value:
                        yield from inner.initializers.values()


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def write_weights(models: Iterable[ir.Model], path: Path) -> dict[int, ir.ExternalTensor]:
    """Write the weights of several models to one file; the models are not changed.

    Weights of equal content are written once. The copies that are held in memory are one tensor at most.

    Args:
        models: The models.
        path: The file. It is not made where there is nothing to write.

    Returns:
        id of a weight's tensor -> where it lies now. Weights that belong into the graph file are not among them.
    """
    tensors = [
        value.const_value
        for model in models
        for value in initializers(model)
        if value.const_value is not None and value.const_value.nbytes > INLINE
    ]
    if not tensors:
        return {}
    places: dict[Any, int] = {}
    external = {}
    with path.open("wb") as file:
        for tensor, key in _keyed(tensors):
            if key not in places:
                content = _content(tensor)
                if len(content) > _ALIGNED_ABOVE:
                    file.write(bytes(-file.tell() % _ALIGNMENT))
                places[key] = file.tell()
                file.write(content)
            external[id(tensor)] = ir.ExternalTensor(
                path.name, places[key], tensor.nbytes, tensor.dtype, shape=tensor.shape,
                name=tensor.name or "", base_dir=path.parent,
            )  # fmt: skip
    return external


def _keyed(tensors: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Every tensor with a key that tensors of equal content have in common.

    Nearly all weights differ in where they lie, and in a few bytes; only those that don't are read as a whole.
    """
    memory = [_memory(tensor) for tensor in tensors]
    looks: dict[Any, Any] = {}
    alike: dict[Any, set[Any]] = {}
    for tensor, place in zip(tensors, memory, strict=True):
        if place not in looks:
            looks[place] = (tensor.dtype, tuple(tensor.shape), _sample(tensor))
            alike.setdefault(looks[place], set()).add(place)
    sums: dict[Any, Any] = {}
    for tensor, place in zip(tensors, memory, strict=True):
        if place not in sums:
            look = looks[place]
            sums[place] = look if len(alike[look]) == 1 else (look, hashlib.sha256(_content(tensor)).digest())
        yield tensor, sums[place]


def _memory(tensor: Any) -> Any:
    """Where a tensor lies; tensors for which that is equal are equal."""
    raw = getattr(tensor, "raw", None)
    if isinstance(raw, torch.Tensor):
        return (raw.device, raw.data_ptr(), raw.dtype, raw.shape, raw.stride())
    if isinstance(raw, np.ndarray):
        return (raw.__array_interface__["data"][0], tensor.dtype, raw.shape, raw.strides)
    return id(tensor)


def _content(tensor: Any) -> memoryview:
    """The bytes of a tensor, as they are in a file; copied only where they don't lie in a row."""
    if tensor.dtype.bitwidth < 8:
        return memoryview(tensor.tobytes())
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data


def _sample(tensor: Any) -> bytes:
    content = np.frombuffer(_content(tensor), np.uint8)
    return content[:: max(1, len(content) // _SAMPLED)].tobytes()


@contextlib.contextmanager
def placed(model: ir.Model, external: Mapping[int, ir.ExternalTensor]) -> Iterator[bool]:
    """While this is entered, the weights of a model are what `write_weights` returned.

    Args:
        model: The model, which comes back unchanged.
        external: What `write_weights` returned.

    Returns:
        Whether any of the weights lies in the file.
    """
    values = list(initializers(model))
    before = [value.const_value for value in values]
    try:
        for value, tensor in zip(values, before, strict=True):
            found = external.get(id(tensor))
            if found is not None:
                value.const_value = found
            elif isinstance(tensor, ir.ExternalTensor):  # a small one of another tool's, in a file of its own
                value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)
        yield any(id(tensor) in external for tensor in before)
    finally:
        for value, tensor in zip(values, before, strict=True):
            value.const_value = tensor


# ── mapping ─────────────────────────────────────────────────────────────────────────────────────────────────────────

#: Identity of a file -> its mapping, as long as any model uses it.
_MAPPED: weakref.WeakValueDictionary[tuple[int, ...], np.memmap] = weakref.WeakValueDictionary()


def identity(file: Path) -> tuple[int, ...]:
    """What tells a file from another one that takes its place."""
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def mapped(file: Path) -> np.memmap:
    """The bytes of a file, mapped once for all that use them."""
    key = identity(file)
    found = _MAPPED.get(key)
    if found is None:
        found = np.memmap(file, np.uint8, mode="r")
        if identity(file) == key:  # it might have been replaced in between
            _MAPPED[key] = found
    return found


def map_weights(model: ir.Model, folder: Path) -> None:
    """Back the weights by one mapping per file, in place of onnx-ir's one per weight.

    onnx-ir refuses files that are links to somewhere else, as those in the hub's cache are; where they may lead was checked
    before (`polyport.manifest.checked_file`).
    """
    files: dict[str, np.memmap] = {}
    for value in initializers(model):
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype.bitwidth < 8:
            continue
        name = str(tensor.location)
        if tensor.nbytes == 0:
            array = np.empty(tensor.shape.numpy(), tensor.dtype.numpy())
        else:
            if name not in files:
                files[name] = mapped(folder / name)
            start = tensor.offset or 0
            flat = files[name][start : start + tensor.nbytes]
            array = np.asarray(flat).view(tensor.dtype.numpy()).reshape(tensor.shape.numpy())
        value.const_value = ir.Tensor(
            array,
            dtype=tensor.dtype,
            shape=tensor.shape,
            name=tensor.name,
            doc_string=tensor.doc_string,
            metadata_props=dict(tensor.metadata_props),
        )
