"""Running a program that keeps caches."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from polyport.errors import ArtifactError, InputError
from polyport.held import HeldTensor, left_by, plain_tensor
from polyport.metadata import ExportMetadata, TensorInfo
from polyport.pipeline import RunRequest
from polyport_dynamo.lowering.caches import KeptCaches
from polyport_executorch.kept import kept_leaves_of, table_of
from polyport_executorch.methods import STATE
from polyport_executorch.runner import ProgramRunner


class _Kept:
    """The caches of a program as they were after one of its steps (see `polyport.held.Keeper`)."""

    def __init__(self, runner: StatefulRunner, shapes: Sequence[torch.Size]) -> None:
        self.runner, self.step, self.shapes = runner, runner.step, shapes
        #: Copies, once the program had to make room.
        self.saved: list[torch.Tensor] | None = None

    def read(self, key: int) -> torch.Tensor:
        """A copy of a cache. What grows is found at the start of what it has grown to.

        Raises:
            InputError: A later step has moved its rows, or overwritten it.
        """
        with self.runner.lock:
            if self.saved is not None:
                return self.saved[key].clone()
            return self.runner.content(self, key)

    def save(self) -> None:
        """Copy all before others take their place."""
        self.saved = [self.runner.content(self, key) for key in range(len(self.shapes))]


class StatefulRunner:
    """Executes one program with state, which any number of threads may share, one step at a time.

    A call that brings the caches of the last step, as they were returned, goes on with what the program has kept; caches of any other
    origin are written into it, and what was there is copied if anything still stands for it. What is returned stands for what is kept
    (`polyport.held.HeldTensor`).

    Args:
        program: The program.
        metadata: The record of the program.
        request: Device and options (see `ProgramRunner`).

    Raises:
        InputError: The device or an option is not available.
        ArtifactError: The program is not the one that the record describes.
    """

    def __init__(self, program: Any, metadata: ExportMetadata, request: RunRequest) -> None:
        names = kept_leaves_of(metadata)
        self._caches = KeptCaches(metadata, names)
        #: Which cache says how long all are, and along which axis.
        self._growing = next(
            ((i, axis) for i, axis in enumerate(self._caches.growing) if axis is not None), None
        )
        length = (TensorInfo("state_length", "int64", ("length",)),) if self._growing else ()
        outside = attrs.evolve(
            metadata,
            inputs=(*(info for info in metadata.inputs if info.name not in names), *length),
            outputs=tuple(info for info in metadata.outputs if info.name not in names),
        )
        self._steps = ProgramRunner(program, outside, request)
        self.device = self._steps.device
        self._tables = self._buffers(metadata)
        self._given = [i for i, info in enumerate(metadata.inputs) if info.name not in names]
        held = {name: index for index, name in enumerate(names)}
        computed = iter(range(len(metadata.outputs)))
        self._returned = [held[n] if n in held else ~next(computed) for n in metadata.output_names]
        self.lock = threading.RLock()
        #: Steps that were taken, and the last of them that moved rows, failed or began anew.
        self.step = self.moved = 0
        self._last: weakref.ref[_Kept] | None = None
        self._lengths = torch.zeros(0, dtype=torch.int64)

    def _buffers(self, metadata: ExportMetadata) -> list[torch.Tensor]:
        """The program's own memory of each cache, at its largest size."""
        method = self._steps.load(STATE)
        # without copies, which the runtime's public class would make
        found = method._method.call((), clone_outputs=False)
        self._state = method  # the tensors don't keep it alive
        outputs = {info.name: info for info in metadata.outputs}
        wanted = [table_of(outputs[name], metadata) for name in self._caches.names]
        sizes = [int(torch.Size(shape).numel()) for shape in wanted]
        if [table.numel() for table in found] != sizes:
            raise ArtifactError(
                f"The program keeps {[tuple(table.shape) for table in found]}, the export's metadata says {wanted}.",
                stage="load",
                backend="executorch",
            )
        return [table.view(shape) for table, shape in zip(found, wanted, strict=True)]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the graph once (see `polyport.pipeline.Runner`)."""
        with self.lock, torch.inference_mode():
            given = [inputs[place] for place in self._caches.places]
            if not self._continues(given):
                self._begin([plain_tensor(one) for one in given])
            self.step += 1  # first, so that what a failed step leaves is not taken for what was there before
            try:
                computed = self._steps([*(inputs[i] for i in self._given), *self._length(given)])
            except InputError:
                self.moved = self.step
                raise
            kept = _Kept(self, self._caches.shapes(inputs))
            self._last = weakref.ref(kept)
            held = [
                HeldTensor(kept, key, shape, dtype)
                for key, (shape, dtype) in enumerate(zip(kept.shapes, self._caches.dtypes, strict=True))
            ]
        return [held[i] if i >= 0 else computed[~i] for i in self._returned]

    def content(self, kept: _Kept, key: int) -> torch.Tensor:
        """A copy of what the program has kept of a step.

        Args:
            kept: What stands for the step.
            key: Which cache.

        Raises:
            InputError: It is gone.
        """
        fixed = self._caches.growing[key] is None
        if kept.step != self.step and (fixed or self.moved > kept.step):
            raise InputError(
                "This cache was continued, and what it was before is gone: the program keeps it in one place. Copy it before it is "
                "continued (copy.deepcopy(cache)), or export with stateful=False.",
                stage="run",
                backend="executorch",
            )
        return self._part(key, kept.shapes[key]).clone()

    def _part(self, key: int, shape: Sequence[int]) -> torch.Tensor:
        return self._tables[key][tuple(slice(0, size) for size in shape)]

    def _continues(self, given: Sequence[Any]) -> bool:
        """Whether all caches of a call are what the last step has left; their rows are then in order."""
        left = left_by(self, given)
        if left is None:
            return False
        kept, rows = left
        if kept.step != self.step or kept.saved is not None:
            return False
        if rows is not None:
            if len(rows) > self._tables[0].shape[0]:
                return False
            for key, shape in enumerate(kept.shapes):
                moved = self._part(key, shape).index_select(0, rows)
                self._part(key, (len(rows), *shape[1:])).copy_(moved)
            self.moved = self.step + 1
        return True

    def _begin(self, contents: Sequence[torch.Tensor]) -> None:
        """Put caches of another origin in the place of what is kept."""
        last = self._last() if self._last is not None else None
        if last is not None and last.saved is None and last.step == self.step and self.moved <= self.step:
            last.save()
        self.moved = self.step + 1
        for key, content in enumerate(contents):
            self._part(key, content.shape).copy_(content)

    def _length(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The input that is as long as the caches are, where they grow."""
        if self._growing is None:
            return []
        cache, axis = self._growing
        length = given[cache].shape[axis]
        if len(self._lengths) < length:
            self._lengths = torch.zeros(2 * length, dtype=torch.int64)
        return [self._lengths[:length]]
