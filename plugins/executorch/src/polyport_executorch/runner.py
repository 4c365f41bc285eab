"""Running a program with ExecuTorch."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from polyport.errors import ArtifactError, ExportError, InputError, PolyportError
from polyport.metadata import ExportMetadata
from polyport.pipeline import Runner, RunRequest
from polyport_dynamo.lowering import Leaves
from polyport_executorch.artifact import LoadedProgram, in_memory
from polyport_executorch.methods import METHOD

logger = logging.getLogger(__name__)

#: What the runtime prints of a call that failed: its operator, and what the kernel says of it.
_CALL = re.compile(r"KernelCall failed at instruction \S+ in operator (\w+::\w+(?:\.\w+)?)")
_REASON = re.compile(r"Check failed \(.*?\): (.+)")


class ProgramRunner:
    """Executes one program. Calls from several threads wait for each other: a program has one memory.

    Args:
        program: The program.
        metadata: The record of the program.
        request: Device and options: none.

    Raises:
        InputError: The device or an option is not available.
        ArtifactError: The program is not the one that the record describes.
    """

    def __init__(self, program: Any, metadata: ExportMetadata, request: RunRequest) -> None:
        request.take()
        if request.device not in (None, "cpu"):
            raise InputError(
                f"An ExecuTorch program runs where it was lowered for, and its inputs are on the CPU; device={request.device!r} "
                "can't be chosen.",
                stage="run",
                backend="executorch",
            )
        self.device = "cpu"
        self._leaves = leaves = Leaves.of(metadata)
        self._program = in_memory(program)
        self._method = self.load(METHOD)
        places = {name: index for index, name in enumerate(leaves.inputs)}
        computed = {name: index for index, name in enumerate(leaves.computed)}
        meta = self._method.metadata
        taken, returned = len(leaves.inputs), len(computed) + len(leaves.in_place)
        if (meta.num_inputs(), meta.num_outputs()) != (taken, returned):
            raise ArtifactError(
                f"The program takes {meta.num_inputs()} inputs and returns {meta.num_outputs()} outputs, the export's metadata says "
                f"{taken} and {returned}.",
                stage="load",
                backend="executorch",
            )
        self._changed = [(places[name], len(computed) + i) for i, name in enumerate(leaves.in_place)]
        self._returned = [
            ~places[leaves.passed_through[name]] if name in leaves.passed_through else computed[name]
            for name in leaves.outputs
        ]
        #: How many outputs are computed; behind them are the contents of inputs.
        self._computed = len(computed)
        self._lock = threading.Lock()

    def load(self, method: str) -> Any:
        """A method of the program. All have one memory.

        Args:
            method: Its name in a file of its own.

        Raises:
            ArtifactError: There is none, or it can't be loaded.
        """
        if isinstance(self._program, LoadedProgram):
            method = self._program.own(method)
        if method not in self._program.method_names:
            raise ArtifactError(f"The program has no method {method!r}.", stage="load", backend="executorch")
        try:
            return self._program.load_method(method)
        except RuntimeError as error:
            raise ArtifactError(
                f"ExecuTorch can't load the program: {error}", stage="load", backend="executorch"
            ) from error

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the graph once (see `polyport.pipeline.Runner`)."""
        try:
            with self._lock:
                outputs = self._settled(inputs) if self._changed else self._method.execute(tuple(inputs))
        except RuntimeError as error:
            raise InputError(
                f"ExecuTorch can't run the program on these inputs: {error}",
                stage="run",
                backend="executorch",
            ) from error
        return [outputs[i] if i >= 0 else inputs[~i] for i in self._returned]

    def _settled(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run a graph that changes inputs, and give these their new contents."""
        # without the copies that the runtime's public class would make: what a static cache takes is long
        outputs = self._method._method.call(tuple(inputs), clone_outputs=False)
        with torch.inference_mode():
            for index, source in self._changed:
                inputs[index].copy_(outputs[source])
        return [output.clone() for output in outputs[: self._computed]]


# ── at export ───────────────────────────────────────────────────────────────────────────────────────────────────────


def try_out(
    manager: Any,
    metadata: ExportMetadata,
    sample: Mapping[str, torch.Tensor],
    make: Callable[..., Runner] = ProgramRunner,
) -> None:
    """Run a program on the sample, where it can run here; nothing is kept.

    Which dtypes and options its kernels take, the runtime only says when they are called.

    Args:
        manager: `executorch.exir.ExecutorchProgramManager`.
        metadata: Its record.
        sample: Leaf -> tensor of the sample; not changed.
        make: Class of the runner.

    Raises:
        ExportError: The program doesn't run. Names the operator where the runtime does.
    """
    from executorch.runtime import Runtime

    delegates = {one.id for plan in manager.executorch_program.execution_plan for one in plan.delegates}
    if not all(map(Runtime.get().backend_registry.is_available, delegates)) or not _fits(metadata, sample):
        return

    def attempt() -> None:
        # copies: a call writes to the buffers of a static cache
        inputs = [
            sample[info.name].detach().to("cpu", getattr(torch, info.dtype)).clone().contiguous()
            for info in metadata.inputs
        ]
        make(manager, metadata, RunRequest())(inputs)

    try:
        attempt()
    except OSError as error:
        # no room for the file that the weights are mapped from; the export may be saved elsewhere
        logger.warning("The program was not tried out: %s", error)
    except PolyportError as error:
        raise ExportError(
            f"The program fails at its first call. {_explained(attempt) or error}",
            stage="lower",
            backend="executorch",
        ) from error


def _fits(metadata: ExportMetadata, sample: Mapping[str, torch.Tensor]) -> bool:
    """Whether the sample has all inputs, at sizes within the limits: `max_sizes` may be smaller."""
    for info in metadata.inputs:
        if info.name not in sample:
            return False
        for size, name in zip(sample[info.name].shape, info.shape, strict=True):
            span = metadata.axes.get(name) if isinstance(name, str) else None
            if span is not None and span.max is not None and size > span.max:
                return False
    return True


def _explained(attempt: Callable[[], None]) -> str:
    """What the runtime prints about a call that fails, as it tells nobody else; empty where it prints nothing of use."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.suppress(PolyportError, OSError):
        attempt()
    if (call := _CALL.search(printed.getvalue())) is None:
        return ""
    reason = _REASON.search(printed.getvalue())
    said = f": {reason[1].strip()}" if reason else ""
    return f"ExecuTorch's kernel of {call[1]} doesn't take what the model gives it{said}."
