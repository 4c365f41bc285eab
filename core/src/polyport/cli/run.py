"""`polyport run`: give an export something and see what it returns."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from polyport.cli import options, render
from polyport.cli.exports import load, only_one_graph, processor_source
from polyport.cli.frame import Outcome, stderr
from polyport.cli.inputs import GivenInputs
from polyport.cli.progress import Stages
from polyport.errors import InputError

#: Values shown of each output.
_SHOWN = 6


def run(
    directory: options.Export,
    text: options.Text = None,
    image: options.Image = None,
    audio: options.Audio = None,
    given: options.Input = None,
    inputs: options.Inputs = None,
    device: options.Device = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the outputs to a .safetensors or .npz file.",
            rich_help_panel="Output",
        ),
    ] = None,
    subfolder: options.Subfolder = "",
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,  # noqa: ARG001 - read by the frame
    debug: options.Debug = False,  # noqa: ARG001
) -> Outcome:
    """Run an export on a text, a picture, a sound or tensors, and show each output."""
    if output is not None and output.suffix not in (".safetensors", ".npz"):
        raise InputError(
            f"Outputs are written to .safetensors or .npz files, not to {output.name}.", stage="run"
        )
    if output is not None and not output.absolute().parent.is_dir():
        raise InputError(f"There is no folder {output.parent} to write {output.name} to.", stage="run")
    stages = Stages(stderr(), quiet=quiet)
    with stages.stage("Loading the export"):
        exported, folder = load(
            directory,
            subfolder,
            revision=revision,
            device=device,
            trust=trust_remote_code,
            check=only_one_graph,
        )
    with stages.stage("Making inputs"):
        wanted = GivenInputs(
            text=text or (), image=image or (), audio=audio or (), specs=given or (), file=inputs
        )
        kwargs = wanted.for_export(exported, processor_source(directory, folder))
    with stages.stage("Running"):
        started = time.perf_counter()
        result = exported(**kwargs)
        seconds = time.perf_counter() - started
    outputs = _named(result)
    if output is not None:
        _write(output, outputs)
    document = {
        "directory": directory,
        "format": exported.export_format,
        "inputs": {name: _summary(value) for name, value in _named(kwargs).items()},
        "outputs": {name: _summary(value) for name, value in outputs.items()},
        "labels": _labels(exported, outputs),
        "seconds": round(seconds, 4),
        "written": None if output is None else str(output),
    }
    return Outcome(document, lambda console: _show(console, document))


def _named(value: Any) -> dict[str, Any]:
    """The tensors in what went in or came out, by their dotted names."""
    import torch

    from polyport.structure import flatten_named

    if isinstance(value, torch.Tensor):
        return {"output": value}
    nested = value if isinstance(value, Mapping) else {"output": value}
    return {name: leaf for name, leaf in flatten_named(dict(nested)) if isinstance(leaf, torch.Tensor)}


def _summary(value: Any) -> dict[str, Any]:
    first = value.detach().flatten()[:_SHOWN].cpu()
    return {
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        "first": first.tolist(),
    }


def _labels(exported: Any, outputs: Mapping[str, Any]) -> list[list[dict[str, Any]]] | None:
    """What a classifier's logits say, for each row the three likeliest labels; None where it is no classifier."""
    names = getattr(exported.config, "id2label", None) or {}
    logits = outputs.get("logits")
    head = next(iter(exported.components.values())).metadata.architecture or ""
    is_classifier = head.endswith("Classification") and not head.endswith("TokenClassification")
    if (
        not is_classifier
        or logits is None
        or logits.ndim != 2
        or logits.shape[1] != len(names)
        or len(names) < 2
    ):
        return None
    several = getattr(exported.config, "problem_type", None) == "multi_label_classification"
    chances = logits.float().sigmoid() if several else logits.float().softmax(dim=-1)
    best = chances.topk(min(3, len(names)), dim=-1)
    return [
        [{"label": names[i], "score": round(p, 6)} for i, p in zip(ids, scores, strict=True)]
        for ids, scores in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _write(path: Path, outputs: Mapping[str, Any]) -> None:
    """Write the outputs to a file, which appears at once."""
    import numpy as np
    import torch
    from safetensors.torch import save_file

    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in outputs.items()}
    halves = [name for name, value in tensors.items() if value.dtype == torch.bfloat16]
    if path.suffix == ".npz" and halves:
        raise InputError(
            f"numpy has no bfloat16 ({', '.join(halves)}): write a .safetensors file.", stage="run"
        )
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(handle)
    try:
        if path.suffix == ".npz":
            np.savez(temporary, **{name: value.numpy() for name, value in tensors.items()})
        else:
            save_file(tensors, temporary)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _show(console: Console, document: Mapping[str, Any]) -> None:
    rows = []
    for name, one in document["outputs"].items():
        values = ", ".join(f"{v:.4f}" if isinstance(v, float) else str(v) for v in one["first"])
        rows.append(
            (name, one["dtype"], render.shape(one), values + (", ..." if len(one["first"]) == _SHOWN else ""))
        )
    console.print(render.table("", ("output", "dtype", "shape", "first values"), rows))
    for row in document["labels"] or ():
        console.print("  ".join(f"{one['label']} {one['score']:.3f}" for one in row), markup=False)
    if document["written"]:
        console.print(f"Written to {document['written']}", markup=False)
