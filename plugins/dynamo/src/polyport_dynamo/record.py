"""The record of a traced program."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

import torch

from polyport import structure
from polyport.capture import rebuilt, tensor_leaves, untouched
from polyport.config import ExportConfig, plain
from polyport.metadata import ExportMetadata, TensorInfo
from polyport.pieces import find_pieces
from polyport.pipeline import CapturedCall
from polyport_dynamo.axes import AxisNames, user_tensors
from polyport_dynamo.writes import written_inputs


def describe(
    program: torch.export.ExportedProgram,
    call: CapturedCall,
    kwargs: Mapping[str, Any],
    constants: Mapping[str, Any],
    names: AxisNames,
    config: ExportConfig,
) -> ExportMetadata:
    """What goes in and out of the program, in names that every format shares."""
    leaves = tensor_leaves(kwargs)
    placeholders = user_tensors(program)
    inputs = [_info(name, node.meta["val"], names) for name, node in zip(leaves, placeholders, strict=True)]
    outputs, out_constants = _outputs(program, names)
    weight = next((p for p in call.model.parameters() if p.is_floating_point()), None)
    device = next((x.device for x in (*call.model.parameters(), *leaves.values())), torch.device("cpu"))
    return ExportMetadata(
        architecture=type(call.model).__name__,
        packages={name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        export_config=config.record(),
        export_dtype=_dtype(weight.dtype) if weight is not None else None,
        export_device=str(device),
        kwargs={name: _described(value) for name, value in kwargs.items()},
        in_spec=structure.dump_structure(structure.flatten(((), dict(kwargs)))[1]),
        out_spec=structure.dump_structure(program.call_spec.out_spec),
        in_constants={name: plain(value) for name, value in constants.items()},
        out_constants=out_constants,
        out_pieces=_pieces(program, call, kwargs, names),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        axes=dict(names.ranges),
        in_place=_in_place(program, list(leaves), placeholders),
        defaults=dict(call.defaults),
    )


def _in_place(
    program: torch.export.ExportedProgram, leaves: list[str], placeholders: list[torch.fx.Node]
) -> tuple[str, ...]:
    changed = written_inputs(program)
    return tuple(leaf for leaf, node in zip(leaves, placeholders, strict=True) if node.name in changed)


def _outputs(program: torch.export.ExportedProgram, names: AxisNames) -> tuple[list[TensorInfo], list[Any]]:
    out_spec = program.call_spec.out_spec
    specs = program.graph_signature.output_specs
    nodes = next(node for node in reversed(program.graph.nodes) if node.op == "output").args[0]
    wanted = [
        (spec, node)
        for spec, node in zip(specs, nodes, strict=True)
        if spec.kind == torch.export.graph_signature.OutputKind.USER_OUTPUT
    ]
    paths = structure.leaf_names(out_spec)
    infos, constants = [], []
    for index, (name, (_, node)) in enumerate(zip(paths, wanted, strict=True)):
        value = node.meta["val"] if isinstance(node, torch.fx.Node) else node
        if isinstance(value, torch.Tensor):
            infos.append(_info(name or "output", value, names))  # a plain tensor has no path
        else:
            size = isinstance(value, torch.SymInt)
            constants.append([index, {"size": str(names.size(value))} if size else plain(value)])
    return infos, constants


def _pieces(
    program: torch.export.ExportedProgram, call: CapturedCall, kwargs: Mapping[str, Any], names: AxisNames
) -> list[tuple[int, str]]:
    """Outputs that stand for one tensor per image, found by asking the model; only models that see images have them."""
    if not any(hasattr(part, "get_image_features") for part in call.model.modules()):
        return []
    out_spec = program.call_spec.out_spec
    traced = structure.unflatten([torch.empty(0)] * out_spec.num_leaves, out_spec)
    sizes = {
        name: int(leaf.shape[dim])
        for leaf_name, leaf in tensor_leaves(kwargs).items()
        for dim, name in call.axes.get(leaf_name, {}).items()
    }
    with untouched(call.model), torch.no_grad():
        wanted = call.model(**rebuilt(call.kwargs, tensor_leaves(kwargs)))
    return sorted((i, name) for i, name in find_pieces(traced, wanted, sizes).items() if name in names.ranges)


def _info(name: str, value: torch.Tensor, names: AxisNames) -> TensorInfo:
    return TensorInfo(name, _dtype(value.dtype), tuple(names.size(size) for size in value.shape))


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"rank": value.dim(), "shape": list(value.shape), "dtype": _dtype(value.dtype)}
    return {"container": type(value).__name__}


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
