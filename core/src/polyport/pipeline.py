"""What goes from one stage of an export to the next.

`capture` -> :class:`CapturedCall` -> `trace` -> :class:`TracedProgram` -> `lower` -> :class:`ExportedComponent` ->
`run` -> :class:`Runner`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

from polyport.config import ExportConfig
from polyport.errors import BackendContractError
from polyport.metadata import AxisRange, ExportMetadata

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True, eq=False)
class BackendInfo:
    """How a backend describes itself.

    Args:
        format: Name of the format, the same as its entry point's.
        config_class: The config it takes; its `export_format` is `format`.
        exporter: Name of its exporter class (`"OnnxExporter"`), importable from the plugin's package.
        suffix: Suffix of the program file (`".onnx"`).
        summary: One line for `polyport backends`.
        companions: Files that may lie beside a program file, as templates with `{file}` and `{stem}`
            (`("{file}.data",)`): looked for where a manifest of another tool doesn't list them.
        builds_on: Formats whose hooks this one falls back on (`("dynamo",)` to have the model traced).
        packages: Distribution name -> PEP 440 range that it supports (`{"onnxruntime": ">=1.20"}`), checked against
            the installed versions before the plugin does any work.
        tested: Distribution name -> version it was last tested with.
        runs_dtypes: dtypes of parameters the runtime can compute with, by device kind (`{"cpu": ("float32",)}`); a
            device kind that is missing is not checked.
    """

    format: str
    config_class: type[ExportConfig]
    exporter: str
    suffix: str
    summary: str
    companions: tuple[str, ...] = ()
    builds_on: tuple[str, ...] = ()
    packages: Mapping[str, str] = attrs.field(factory=dict)
    tested: Mapping[str, str] = attrs.field(factory=dict)
    runs_dtypes: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True, eq=False)
class CapturedCall:
    """One call of the model, made ready for tracing.

    Args:
        model: The caller's model, untouched.
        kwargs: Forward kwargs to trace with: copies of the sample, enlarged where a size would freeze an axis.
            Kwargs that are no tensors or containers of tensors are constants of the trace.
        dynamic_shapes: What `torch.export.export` takes under that name, per kwarg; None for a static trace.
        axes: Input leaf -> {axis index: name}, of the axes that vary.
        ranges: Name of an axis -> the sizes it may take.
        defaults: Inputs a call may leave out, with how they are filled (see `ExportMetadata.defaults`).
        sample: The caller's own inputs after preparation, at their own sizes: what `verify` starts from.
    """

    model: Any
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any = None
    axes: Mapping[str, Mapping[int, str]] = attrs.field(factory=dict)
    ranges: Mapping[str, AxisRange] = attrs.field(factory=dict)
    defaults: Mapping[str, str] = attrs.field(factory=dict)
    sample: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True, eq=False)
class TracedProgram:
    """A traced model: the graph that every backend lowers. Shared between formats, so nobody changes it.

    Args:
        program: The graph, in torch.export's training IR, with weights shared with the model.
        metadata: Names, shapes and structure of what goes in and out.
        call: The captured call it was traced from.
    """

    program: torch.export.ExportedProgram
    metadata: ExportMetadata
    call: CapturedCall


@attrs.frozen(kw_only=True, eq=False)
class ExportedComponent:
    """One exported graph: the backend's program and what is known about it.

    Args:
        program: The backend's own object (`torch.export.ExportedProgram`, `onnx_ir.Model`...).
        metadata: The record of the graph.
    """

    program: Any
    metadata: ExportMetadata


@attrs.frozen(kw_only=True)
class RunRequest:
    """Where and how a component shall run.

    Args:
        device: `"cpu"`, `"cuda"`, `"cuda:1"`, `"xpu"` or a name of the runtime's own; None for the backend's default.
        options: Options of the backend's runner (`providers`, `session_options`...).
    """

    device: str | None = None
    options: Mapping[str, Any] = attrs.field(factory=dict)

    def take(self, **defaults: Any) -> dict[str, Any]:
        """The options with their defaults filled in.

        Raises:
            InputError: An option that is not among `defaults`; the message lists the valid ones.
        """
        from polyport.errors import InputError

        for name in self.options:
            if name not in defaults:
                raise InputError(
                    f"There is no runner option {name!r}. Valid options: {', '.join(sorted(defaults)) or 'none'}.",
                    stage="run",
                )
        return {**defaults, **self.options}


@runtime_checkable
class Runner(Protocol):
    """What executes a component. It must be safe to call from several threads at once."""

    #: The torch device on which inputs are expected and outputs are returned, as a string (`"cpu"`).
    device: str

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the graph once.

        Args:
            inputs: One tensor per `metadata.inputs`, in that order, contiguous, of the traced dtype, on `device`. Sizes
                were checked against the metadata. They may share memory with the caller's tensors: write to none but
                those that `metadata.in_place` names, which get their new content where they lie. Tensors that this runner
                returned as held (`polyport.held.HeldTensor`) come back as they are.

        Returns:
            One tensor per `metadata.outputs`, in that order, which nobody else writes to afterwards; a changed input
            that is returned is the caller's own tensor.
        """
        ...


def checked_runner(value: Any, backend: str) -> Runner:
    """`value` if it is a runner.

    Raises:
        BackendContractError: It is not.
    """
    if not isinstance(value, Runner):
        raise BackendContractError(
            f"polyport_run of backend {backend!r} returned {type(value).__name__}, not a runner (callable, with `device`).",
            stage="run",
            backend=backend,
        )
    return value
