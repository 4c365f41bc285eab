"""Weights in a safetensors file that several programs share, read without copying.

A file is mapped once per process, so programs that were saved together, and the same export loaded twice, hold the same
memory. The map is private: what somebody writes to a weight reaches neither the file nor other processes.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from safetensors import SafetensorError, safe_open

from polyport.errors import ArtifactError


class WeightsFile:
    """One mapped file.

    Args:
        path: The file.

    Raises:
        ArtifactError: It is no safetensors file, or truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # held open, as the map ends with it; as a context manager it would be closed
            self._file = cast("Any", safe_open(str(path), framework="pt"))
            self.keys = frozenset(self._file.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise ArtifactError(f"{path} can't be read: {error}.", stage="load", backend="dynamo") from error
        self._tensors: dict[str, torch.Tensor] = {}
        self._places: set[int] = set()
        self._elsewhere: WeakValueDictionary[Any, torch.Tensor] = WeakValueDictionary()
        self._lock = threading.Lock()

    def tensor(self, key: str) -> torch.Tensor:
        """A weight, in the memory that is the same for everyone who asks."""
        with self._lock:
            if key not in self._tensors:
                self._tensors[key] = self._file.get_tensor(key)
                self._places.add(self._tensors[key].untyped_storage().data_ptr())
            return self._tensors[key]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the map."""
        with self._lock:
            return tensor.untyped_storage().data_ptr() in self._places

    def on(self, device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
        """A weight or a view of one on another device, the same copy for everyone who asks while it is in use."""
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        key = (*place, type(tensor), tensor.requires_grad, device)
        with self._lock:
            copy = self._elsewhere.get(key)
            if copy is None:
                copy = tensor.detach().to(device)
                if isinstance(tensor, torch.nn.Parameter):
                    copy = torch.nn.Parameter(copy, tensor.requires_grad)
                self._elsewhere[key] = copy
            return copy


_lock = threading.Lock()

#: The maps of this process, by what the file is: a file that takes its place under the same name is another one.
_open: WeakValueDictionary[tuple[int, ...], WeightsFile] = WeakValueDictionary()

#: What keeps them: the programs that use them.
_held: WeakKeyDictionary[torch.export.ExportedProgram, WeightsFile] = WeakKeyDictionary()


def open_weights(path: Path, program: torch.export.ExportedProgram) -> WeightsFile:
    """The map of a file, kept as long as the program is.

    Raises:
        ArtifactError: The file can't be read.
    """
    with _lock:
        try:
            status = path.stat()
        except OSError as error:
            raise ArtifactError(f"{path} can't be read: {error}.", stage="load", backend="dynamo") from error
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        weights = _open.get(identity)
        if weights is None:
            weights = _open[identity] = WeightsFile(path)
        _held[program] = weights
        return weights


def move_weights(program: torch.export.ExportedProgram, device: torch.device) -> None:
    """Move the weights that a program shares with others to a device, once for all of them; changed in place."""
    weights = _held.get(program)
    if weights is None:
        return
    for home in (program.state_dict, program.constants):
        for name, tensor in home.items():
            if isinstance(tensor, torch.Tensor) and weights.holds(tensor):
                home[name] = weights.on(device, tensor)
