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
    from polyport.capture import tensor_leaves, untouched

    with untouched(call.model), torch.no_grad():
        output = call.model(**call.kwargs)
    weight = next(call.model.parameters())
    inputs = []
    for name, leaf in tensor_leaves(call.kwargs).items():
        shape = tuple(call.axes.get(name, {}).get(axis, size) for axis, size in enumerate(leaf.shape))
        inputs.append(TensorInfo(name, _name(leaf.dtype), shape))
    metadata = ExportMetadata(
        architecture=type(call.model).__name__,
        export_config=config.record(),
        export_dtype=_name(weight.dtype),
        export_device=str(weight.device),
        kwargs={name: {} for name in call.kwargs},
        in_spec=structure.dump_structure(structure.flatten(((), dict(call.kwargs)))[1]),
        out_spec=structure.dump_structure(structure.flatten(output)[1]),
        inputs=tuple(inputs),
        outputs=tuple(
            TensorInfo(n, _name(x.dtype), ("?",) * x.dim()) for n, x in tensor_leaves(output).items()
        ),
        axes=dict(call.ranges),
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

        cls = getattr(transformers, str(metadata.architecture))
        self.model = cls(cls.config_class.from_dict(metadata.backend["config"])).eval()
        self.model.to(getattr(torch, str(metadata.export_dtype)))
        try:
            self.model.load_state_dict(dict(weights))
        except RuntimeError as error:
            raise ArtifactError(
                f"The weights are not those of {metadata.architecture}.", stage="run"
            ) from error
        self.names = metadata.input_names

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        import torch

        with torch.no_grad():
            output = self.model(**dict(zip(self.names, inputs, strict=True)))
        return list(output.values())
