"""Greedy loops over a bare ONNX Runtime session: the least that generation with a graph can cost.

Both systems' decode graphs fit, as they name a cache's tensors alike: `input.<leaf>` goes in, `output.<leaf>` comes out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
from greedy import GreedyLoop

_TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}


def session(path: str) -> Any:
    """A session of one thread."""
    return ort.InferenceSession(path, one_thread(), providers=["CPUExecutionProvider"])


def one_thread() -> Any:
    """Options of a session of one thread, without ONNX Runtime's remarks on the graph."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return options


class _Loop(GreedyLoop):
    """A loop over a session.

    Args:
        session: A session on a decode graph that takes any number of tokens.
        room: Tokens that a static cache has room for.
    """

    def __init__(self, session: Any, room: int = 0) -> None:
        self.session, self.room = session, room
        self.inputs = {value.name: value for value in session.get_inputs()}
        self.outputs = [value.name for value in session.get_outputs()]
        self.states = [name for name in self.inputs if name.startswith("input.")]

    def arguments(self, fresh: np.ndarray) -> dict[str, np.ndarray]:
        """See `GreedyLoop`."""
        return {name: array for name, array in super().arguments(fresh).items() if name in self.inputs}

    def empty(self, name: str) -> np.ndarray:
        """An empty cache's tensor: axis 0 counts rows, axis 2 tokens, and others keep their sizes."""
        shape = [int(size) if str(size).isdigit() else {0: 1, 2: self.room}[axis]
                 for axis, size in enumerate(self.inputs[name].shape)]  # fmt: skip
        if shape:
            shape[2] = self.room
        return np.zeros(shape, _TYPES[self.inputs[name].type])


class Growing(_Loop):
    """A cache that grows: what a step returned is bound to the next one."""

    def start(self) -> None:
        """See `_Loop`."""
        self.cache = {name: ort.OrtValue.ortvalue_from_numpy(self.empty(name)) for name in self.states}

    def step(self, given: dict[str, np.ndarray]) -> np.ndarray:
        """See `_Loop`."""
        binding = self.session.io_binding()
        for name, array in given.items():
            binding.bind_cpu_input(name, array)
        for name, value in self.cache.items():
            binding.bind_ortvalue_input(name, value)
        for name in self.outputs:
            binding.bind_output(name)
        self.session.run_with_iobinding(binding)
        values = dict(zip(self.outputs, binding.get_outputs(), strict=True))
        self.cache = {name: values[name.replace("input.", "output.", 1)] for name in self.states}
        logits: np.ndarray = values["logits"].numpy()
        return logits


class Static(_Loop):
    """A cache of fixed size, whose keys and values a step writes where they lie: nothing is copied.

    Counters of tokens are read all over the graph, and must not change while it runs: the loop counts itself.
    """

    def start(self) -> None:
        """See `_Loop`."""
        self.binding = self.session.io_binding()
        self.binding.bind_output("logits")
        self.seen = np.zeros((), np.int64)
        self.buffers = []
        for name in self.states:
            if not self.inputs[name].shape:
                self._bind(self.binding.bind_input, name, self.seen)
                continue
            buffer = self.empty(name)
            self.buffers.append(buffer)
            self._bind(self.binding.bind_input, name, buffer)
            self._bind(self.binding.bind_output, name.replace("input.", "output.", 1), buffer)

    def step(self, given: dict[str, np.ndarray]) -> np.ndarray:
        """See `_Loop`."""
        self.seen[...] = self.past
        for name, array in given.items():
            self.binding.bind_cpu_input(name, array)
        self.binding.bind_output("logits")  # of another size after the prompt
        self.session.run_with_iobinding(self.binding)
        logits: np.ndarray = self.binding.get_outputs_as_ortvaluevector()[0].numpy()
        return logits

    @staticmethod
    def _bind(to: Any, name: str, array: np.ndarray) -> None:
        to(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
