"""Weights that the programs of an export share, written once.

Beside several archives lies one `weights.safetensors`. In the archives each of its tensors is an empty one, and an extra file
in JSON says what belongs in its place::

    {"version": 1, "file": "weights.safetensors", "weights": {
        "lm_head.weight": {"key": "model.embed_tokens.weight"},
        "halves.1": {"key": "halves.0", "shape": [2, 4], "stride": [8, 1], "offset": 4, "frozen": true}}}

A shape goes with a weight that is a view: its key then holds the memory that it and others look at, as a flat tensor. Frozen
is a parameter that takes no gradient.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from polyport_dynamo.writes import written

#: The extra file of an archive that says where its weights are.
MAPPING = "polyport_weights.json"

WEIGHTS_FILE = "weights.safetensors"

#: A constant of up to this many bytes stays in its archive.
_SMALL = 1024

#: dtypes that safetensors has.
_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "uint16",
        "uint32", "uint64", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    )
)  # fmt: skip

#: Name of a weight -> where it is, as in the extra file.
Places = Mapping[str, Mapping[str, Any]]


@attrs.frozen(eq=False)
class _Weight:
    component: str
    name: str
    tensor: torch.Tensor
    #: Whether it is a parameter that takes no gradient.
    frozen: bool

    @property
    def start(self) -> int:
        return int(self.tensor.storage_offset())

    @property
    def end(self) -> int:
        """The place in its storage after its last element."""
        return (
            self.start
            + 1
            + sum((n - 1) * step for n, step in zip(self.tensor.shape, self.tensor.stride(), strict=True))
        )


def shared_weights(
    programs: Mapping[str, torch.export.ExportedProgram],
) -> tuple[dict[str, torch.Tensor], dict[str, Places]]:
    """What the common file of several programs holds.

    Args:
        programs: Component name -> program.

    Returns:
        Key -> tensor, contiguous; and component name -> where each of its weights is. Left out are tensors that the file
        can't hold, and those that a program writes to.
    """
    runs = list(_runs(_weights(programs)))
    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, dict[str, Mapping[str, Any]]] = {name: {} for name in programs}
    known: dict[Any, list[str]] = defaultdict(list)
    users: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        memory, whole = _memory(run)
        alike, components = known[_likeness(memory)], {weight.component for weight in run}
        # two programs may hold copies of a weight; two weights of one program are two, even where they are equal now
        same = (key for key in alike if not users[key] & components and _equal(tensors[key], memory))
        key = next(same, None)
        if key is None:
            key = _unused(run[0], tensors)
            tensors[key] = memory
            alike.append(key)
        users[key] |= components
        for weight in run:
            places[weight.component][weight.name] = {
                "key": key,
                **({} if whole else _view(weight, run)),
                **({"frozen": True} if weight.frozen else {}),
            }
    return tensors, dict(places)


def _weights(programs: Mapping[str, torch.export.ExportedProgram]) -> Iterator[_Weight]:
    """The weights that can be shared, in the programs' order."""
    found = []
    taken = set()
    for component, program in programs.items():
        own = written(program)
        for home, least in ((program.state_dict, 1), (program.constants, _SMALL + 1)):
            for name, tensor in home.items():
                if not isinstance(tensor, torch.Tensor) or not _holdable(tensor):
                    continue
                if name in own:
                    taken.add(tensor.untyped_storage().data_ptr())
                elif tensor.nbytes >= least:
                    frozen = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
                    found.append(_Weight(component, name, tensor.detach(), frozen))
    # what shares memory with a tensor that is written to changes with it
    return (weight for weight in found if weight.tensor.untyped_storage().data_ptr() not in taken)


def _holdable(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and tensor.dtype in _DTYPES
        and tensor.numel() > 0
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _runs(weights: Iterator[_Weight]) -> Iterator[list[_Weight]]:
    """Weights whose memory overlaps, together; ordered by the first of each."""
    order: dict[int, int] = {}
    storages: dict[Any, list[_Weight]] = defaultdict(list)
    for weight in weights:
        order[id(weight)] = len(order)
        tensor = weight.tensor
        storages[tensor.untyped_storage().data_ptr(), tensor.device, tensor.dtype].append(weight)
    runs: list[list[_Weight]] = []
    for members in storages.values():
        end = -1
        for weight in sorted(members, key=lambda weight: weight.start):
            if weight.start >= end:
                runs.append([])
            runs[-1].append(weight)
            end = max(end, weight.end)
    for run in runs:
        run.sort(key=lambda weight: order[id(weight)])
    yield from sorted(runs, key=lambda run: order[id(run[0])])


def _memory(run: Sequence[_Weight]) -> tuple[torch.Tensor, bool]:
    """The tensor to write for a run, and whether each weight is all of it."""
    first = run[0].tensor
    if first.is_contiguous() and all(
        (weight.start, weight.tensor.shape, weight.tensor.stride())
        == (run[0].start, first.shape, first.stride())
        for weight in run
    ):
        return first, True
    start, end = min(weight.start for weight in run), max(weight.end for weight in run)
    return torch.as_strided(first, (end - start,), (1,), start), False


def _view(weight: _Weight, run: Sequence[_Weight]) -> dict[str, Any]:
    return {
        "shape": list(weight.tensor.shape),
        "stride": list(weight.tensor.stride()),
        "offset": weight.start - min(other.start for other in run),
    }


def _likeness(tensor: torch.Tensor) -> Any:
    """Something that equal tensors have in common and others hardly: most weights are never compared as a whole."""
    flat = tensor.reshape(-1)
    some = flat[:: max(1, flat.numel() // 64)].contiguous().view(torch.uint8)
    return tensor.dtype, tensor.device, tensor.shape, some.cpu().numpy().tobytes()


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _unused(weight: _Weight, keys: Mapping[str, Any]) -> str:
    """A key for a weight: its name, unless a weight of another component has that name."""
    key = weight.name
    while key in keys:
        key = f"{weight.component}.{key}"
    return key


def write_weights(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write the common file."""
    from safetensors.torch import save_file

    # tensors of different dtypes may look at the same memory, which safetensors refuses
    dtypes: dict[int, torch.dtype] = {}
    apart = {}
    for key, tensor in tensors.items():
        first = dtypes.setdefault(tensor.untyped_storage().data_ptr(), tensor.dtype)
        apart[key] = tensor if tensor.dtype == first else tensor.clone()
    save_file(apart, str(path), metadata={"format": "pt"})


def dump_places(places: Places) -> str:
    """The extra file's text."""
    return json.dumps({"version": 1, "file": WEIGHTS_FILE, "weights": places})


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """The empty tensor that an archive holds in place of a weight."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    # torch reads all empty tensors of a dtype as one, so if one took gradients they all would
    return torch.nn.Parameter(empty, False) if isinstance(tensor, torch.nn.Parameter) else empty
