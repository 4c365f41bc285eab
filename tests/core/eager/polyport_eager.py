"""A backend without a runtime: the model itself, saved as its weights. What the tests of the conformance suite break.

Core alone must be able to test its suite, so nothing is traced: the record of what goes in and out is made from a call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs

from polyport.config import ExportConfig
from polyport.errors import ArtifactError, InputError
from polyport.exporter import HfExporter
from polyport.markers import hookimpl
from polyport.metadata import ExportMetadata, TensorInfo
from polyport.pipeline import BackendInfo, CapturedCall, ExportedComponent, Runner, RunRequest, TracedProgram


@attrs.frozen(kw_only=True)
class EagerConfig(ExportConfig):
    """No options of its own."""

    export_format: ClassVar[str] = "eager"


class EagerExporter(HfExporter):
    export_format = "eager"


@hookimpl
def polyport_backend() -> BackendInfo:
    return BackendInfo(
        format="eager",
        config_class=EagerConfig,
        exporter="EagerExporter",
        suffix=".safetensors",
        summary="the model itself",
        packages={"torch": ">=2.9"},
    )


@hookimpl
def polyport_trace(call: CapturedCall, config: ExportConfig) -> TracedProgram:
    import torch

    from polyport import structure
    from polyport.capture import is_constant, rebuilt, tensor_leaves, true_lengths, untouched

    constants = {name: value for name, value in call.kwargs.items() if is_constant(value)}
    kwargs = {name: value for name, value in call.kwargs.items() if name not in constants}
    leaves = {name: leaf.clone() for name, leaf in tensor_leaves(kwargs).items()}
    given = rebuilt(kwargs, leaves)
    versions = {name: leaf._version for name, leaf in leaves.items()}
    with untouched(call.model), torch.no_grad(), true_lengths(given):
        output = call.model(**given, **constants)
    weight = next(call.model.parameters())
    inputs = []
    for name, leaf in leaves.items():
        shape = tuple(call.axes.get(name, {}).get(axis, size) for axis, size in enumerate(leaf.shape))
        inputs.append(TensorInfo(name, _name(leaf.dtype), shape))
    metadata = ExportMetadata(
        architecture=type(call.model).__name__,
        export_config=config.record(),
        export_dtype=_name(weight.dtype),
        export_device=str(weight.device),
        kwargs={name: {} for name in kwargs},
        in_spec=structure.dump_structure(structure.flatten(((), kwargs))[1]),
        in_constants=constants,
        out_spec=structure.dump_structure(structure.flatten(output)[1]),
        inputs=tuple(inputs),
        outputs=tuple(
            TensorInfo(n, _name(x.dtype), ("?",) * x.dim()) for n, x in tensor_leaves(output).items()
        ),
        axes=dict(call.ranges),
        in_place=tuple(name for name, leaf in leaves.items() if leaf._version != versions[name]),
        defaults=dict(call.defaults),
        backend={"config": json.loads(call.model.config.to_json_string(use_diff=False))},
    )
    return TracedProgram(program=None, metadata=metadata, call=call)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@hookimpl
def polyport_lower(traced: TracedProgram, config: EagerConfig) -> ExportedComponent:
    weights = {name: tensor.clone() for name, tensor in traced.call.model.state_dict().items()}
    return ExportedComponent(program=weights, metadata=traced.metadata)


@hookimpl
def polyport_save(
    components: Mapping[str, ExportedComponent], directory: Path
) -> Mapping[str, Sequence[str]]:
    from safetensors.torch import save_file

    for name, component in components.items():
        save_file({key: x.clone() for key, x in component.program.items()}, directory / f"{name}.safetensors")
    return {name: (f"{name}.safetensors",) for name in components}


@hookimpl
def polyport_load(files: Sequence[Path], metadata: ExportMetadata, trust: bool) -> dict[str, Any]:
    from safetensors.torch import load_file

    try:
        return load_file(files[0])
    except Exception as error:
        raise ArtifactError(f"{files[0]} can't be read: {error}", stage="load") from error


@hookimpl
def polyport_run(component: ExportedComponent, request: RunRequest) -> Runner:
    request.take()
    if request.device not in (None, "cpu"):
        raise InputError(f"There is no device {request.device!r} here.", stage="run")
    return EagerRunner(component.program, component.metadata)


class EagerRunner:
    device = "cpu"

    def __init__(self, weights: Mapping[str, Any], metadata: ExportMetadata) -> None:
        import torch
        import transformers

        from polyport import structure

        cls = getattr(transformers, str(metadata.architecture))
        self.model = cls(cls.config_class.from_dict(metadata.backend["config"])).eval()
        self.model.to(getattr(torch, str(metadata.export_dtype)))
        try:
            self.model.load_state_dict(dict(weights))
        except RuntimeError as error:
            raise ArtifactError(
                f"The weights are not those of {metadata.architecture}.", stage="run"
            ) from error
        self.spec = structure.load_structure(str(metadata.in_spec))
        self.constants = metadata.in_constants

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        import torch

        from polyport import structure
        from polyport.capture import tensor_leaves, true_lengths

        kwargs = structure.unflatten(inputs, self.spec)[1]
        with torch.no_grad(), true_lengths(kwargs):
            output = tensor_leaves(self.model(**kwargs, **self.constants))
        return list(output.values())
