"""Greedy loops over a bare OpenVINO request: the least that generation with a graph can cost.

Decode graphs of polyport, of the peer and of optimum-intel fit: the cache is in variables of the model, or `input.<leaf>` goes in
and `output.<leaf>` comes out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from greedy import GreedyLoop

#: One thread, and as exact as eager: a model may ask for a cache of fewer bits by itself.
CONFIG = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}


def graph(folder: Path) -> Path:
    """The file of a folder's model, or of its graph for new tokens if there are several."""
    files = sorted(folder.glob("openvino*.xml"))
    return next((file for file in files if "decode" in file.name), files[0])


def compiled(path: Path, **options: Any) -> Any:
    """A model that is compiled for one thread of the CPU.

    Args:
        path: The file.
        options: Properties besides, and instead of, `CONFIG`.
    """
    return ov.Core().compile_model(path, "CPU", CONFIG | options)


def loop(path: Path, **options: Any) -> _Loop:
    """A loop over a model that keeps its cache in variables, or that takes and returns it.

    Args:
        path: The file.
        options: Properties besides, and instead of, `CONFIG`.
    """
    model = compiled(path, **options)
    takes_cache = any(tensor.any_name.startswith("input.") for tensor in model.inputs)
    return Growing(model) if takes_cache else Stateful(model)


class _Loop(GreedyLoop):
    """A loop over a request.

    Args:
        model: A compiled decode graph that takes any number of tokens.
    """

    def __init__(self, model: Any) -> None:
        self.inputs = {tensor.any_name: tensor for tensor in model.inputs}

    def arguments(self, fresh: np.ndarray) -> dict[str, Any]:
        """See `GreedyLoop`."""
        given = {**super().arguments(fresh), "beam_idx": np.zeros(1, np.int32)}
        return {name: ov.Tensor(array) for name, array in given.items() if name in self.inputs}


class Stateful(_Loop):
    """A cache that the runtime keeps.

    Args:
        model: See `_Loop`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.request = model.create_infer_request()

    def start(self) -> None:
        """See `_Loop`."""
        self.request.reset_state()

    def step(self, given: dict[str, Any]) -> np.ndarray:
        """See `_Loop`."""
        return _run(self.request, given)


class Growing(_Loop):
    """A cache that goes in and comes out: two requests take turns, and each reads what the other one wrote.

    Args:
        model: See `_Loop`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.requests = model.create_infer_request(), model.create_infer_request()
        self.caches = [name for name in self.inputs if name.startswith("input.")]

    def start(self) -> None:
        """See `_Loop`."""
        self.cache = {name: self._empty(name) for name in self.caches}

    def step(self, given: dict[str, Any]) -> np.ndarray:
        """See `_Loop`."""
        request, other = self.requests
        logits = _run(request, given | self.cache)
        self.requests = other, request
        self.cache = {name: request.get_tensor(name.replace("input.", "output.", 1)) for name in self.caches}
        return logits

    def _empty(self, name: str) -> Any:
        """An empty cache's tensor: axis 0 counts rows, axis 2 tokens, and others keep their sizes."""
        shape = [size.get_length() if size.is_static else 1 for size in self.inputs[name].partial_shape]
        shape[2] = 0
        return ov.Tensor(self.inputs[name].element_type, ov.Shape(shape))


def _run(request: Any, given: dict[str, Any]) -> np.ndarray:
    for name, tensor in given.items():
        request.set_tensor(name, tensor)
    request.infer()
    logits: np.ndarray = request.get_tensor("logits").data
    return logits
