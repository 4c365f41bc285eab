"""Greedy loops over a bare ExecuTorch method: the least that generation with a graph can cost from Python.

Decode graphs of polyport and of the peer fit: the cache goes in and comes out, or polyport's program keeps it. A program knows no
names, so they are read from the record beside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from executorch.extension.pybindings import _portable_lib
from executorch.runtime import Runtime
from greedy import GreedyLoop

#: ExecuTorch's numbers of the dtypes that occur here.
_DTYPES = {4: torch.int64, 6: torch.float32, 11: torch.bool}


def one_thread() -> None:
    """Keep the runtime to one thread; before any program is loaded."""
    Runtime.get()
    _portable_lib._unsafe_reset_threadpool(1)


def graph(folder: Path) -> Path:
    """The file of a folder's only program."""
    return next(iter(folder.glob("*.pte")))


def loop(folder: Path) -> _Loop:
    """A loop over a program with one method for any number of tokens, alone or beside `state`.

    Args:
        folder: Where it was saved, with its record.
    """
    program = Runtime.get().load_program(graph(folder))
    method = program.load_method("forward")
    names = _names(json.loads((folder / "export.json").read_text()))
    if "state" in program.method_names:
        return Stateful(method, [*names, "state_length"])
    return Passed(method, names)


def _names(record: dict[str, Any]) -> list[str]:
    """Inputs of a program besides the cache, in order; behind those of the peer there are only the cache's."""
    (component,) = record["components"].values()
    metadata = component["metadata"]
    if "inputs" not in metadata:
        return [name for name, given in metadata["kwargs"].items() if "shape" in given]
    return ["" if info["name"].startswith("cache.") else info["name"] for info in metadata["inputs"]]


class _Loop(GreedyLoop):
    """A loop over a method.

    Args:
        method: The loaded method.
        names: Names of its inputs, empty for the cache's.
    """

    def __init__(self, method: Any, names: Sequence[str]) -> None:
        self.method, self.meta = method, method.metadata
        count = self.meta.num_inputs()
        self.names = [*names, *[""] * (count - len(names))]
        self.caches = [place for place, name in enumerate(self.names) if not name]
        self.sizes = {place: tuple(self.meta.input_tensor_meta(place).sizes()) for place in self.caches}
        # a static cache counts its tokens, and has room for as many as it can have
        self.room = max(size[2] for size in self.sizes.values() if size) if () in self.sizes.values() else 0

    def arguments(self, fresh: np.ndarray) -> dict[str, torch.Tensor]:
        """See `GreedyLoop`."""
        given = {name: torch.from_numpy(array) for name, array in super().arguments(fresh).items()}
        # not of numpy: of what is empty, the strides are not those that ExecuTorch takes
        given["state_length"] = torch.zeros(self.past, dtype=torch.int64)
        return {name: tensor for name, tensor in given.items() if name in self.names}


class Stateful(_Loop):
    """A cache that the program keeps: `state_length` says how much of it counts.

    Args:
        method: See `_Loop`.
        names: See `_Loop`; those of the cache are no inputs.
    """

    def __init__(self, method: Any, names: Sequence[str]) -> None:
        super().__init__(method, [name for name in names if name])

    def start(self) -> None:
        """See `_Loop`."""

    def step(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        """See `_Loop`."""
        logits: torch.Tensor = self.method.execute([given[name] for name in self.names])[0]
        return logits


class Passed(_Loop):
    """A cache that goes in and comes out, growing or of a fixed size: what a step returned goes into the next.

    Args:
        method: See `_Loop`.
        names: See `_Loop`.
    """

    def __init__(self, method: Any, names: Sequence[str]) -> None:
        super().__init__(method, names)
        ranks = [len(self.meta.output_tensor_meta(i).sizes()) for i in range(self.meta.num_outputs())]
        self.logits = ranks.index(3)
        # a graph may return inputs that it changed in front of its outputs as well
        self.returned = [i for i in range(len(ranks)) if i != self.logits][-len(self.caches) :]

    def start(self) -> None:
        """See `_Loop`."""
        self.cache = {place: self._empty(place) for place in self.caches}

    def step(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        """See `_Loop`."""
        inputs = [given[name] if name else self.cache[place] for place, name in enumerate(self.names)]
        outputs = self.method.execute(inputs)
        self.cache = {place: outputs[i] for place, i in zip(self.caches, self.returned, strict=True)}
        logits: torch.Tensor = outputs[self.logits]
        return logits

    def _empty(self, place: int) -> torch.Tensor:
        """An empty cache's tensor: axis 0 counts rows, axis 2 tokens, and others keep their sizes."""
        shape = list(self.sizes[place])
        if shape:
            shape[0], shape[2] = 1, self.room
        return torch.zeros(shape, dtype=_DTYPES[self.meta.input_tensor_meta(place).dtype()])
