"""`polyport export`: from a model to one or more exports, proved against the model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from polyport.cli import options, render
from polyport.cli.frame import Outcome, stderr
from polyport.cli.generation import Generation
from polyport.cli.inputs import GivenInputs
from polyport.cli.progress import Stages, hide_loading_bars, pipeline_progress
from polyport.cli.settings import build_configs
from polyport.errors import ExportError

_WHAT = "What to export to"
_GENERATING = "Generation"


def export(
    model: options.Model,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Where to write; DIR/<format> with several formats."
        ),
    ],
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to", metavar="FORMAT", help="A format; again for more, from one trace.", rich_help_panel=_WHAT
        ),
    ] = None,
    dynamic: Annotated[
        bool,
        typer.Option(
            "--dynamic/--static",
            help="Any batch, length and image size the model takes, or the sample's only.",
            rich_help_panel=_WHAT,
        ),
    ] = True,
    opset: Annotated[
        int | None,
        typer.Option("--opset", metavar="N", help="Short for --set opset_version=N.", rich_help_panel=_WHAT),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[FORMAT.]KEY=VALUE",
            help="Any option of the format's config; of those formats that have it, or of one.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Trace with TorchDynamo's bytecode analysis.", rich_help_panel=_WHAT),
    ] = False,
    generate: Annotated[
        bool,
        typer.Option(
            "--generate",
            help="Export the parts that generate needs, for polyport generate.",
            rich_help_panel=_GENERATING,
        ),
    ] = False,
    multi_token_decode: Annotated[
        bool,
        typer.Option(
            "--multi-token-decode",
            help="Let the decode step take any number of tokens: one graph then prefills, decodes and continues.",
            rich_help_panel=_GENERATING,
        ),
    ] = False,
    static_cache: Annotated[
        int | None,
        typer.Option(
            "--static-cache",
            metavar="N",
            min=2,
            help="Use a cache of a fixed size: N tokens, with the prompt.",
            rich_help_panel=_GENERATING,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="Convert the weights first: float32, float16, bfloat16.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Load what was saved and compare it with the model.",
            rich_help_panel=_WHAT,
        ),
    ] = True,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace an export that is there already.", rich_help_panel="Output"),
    ] = False,
    text: options.Text = None,
    image: options.Image = None,
    audio: options.Audio = None,
    given: options.Input = None,
    inputs: options.Inputs = None,
    task: options.Task = None,
    gguf_file: options.GgufFile = None,
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,  # noqa: ARG001 - read by the frame
    debug: options.Debug = False,  # noqa: ARG001
) -> Outcome:
    """Export a model, save it with its tokenizer or processor, and prove that it computes the same."""
    started = time.process_time()
    generation = Generation.from_options(generate, multi_token_decode, static_cache, dynamic)
    configs = build_configs(to or [], dynamic=dynamic, strict=strict, opset=opset, settings=settings or [])
    targets = _targets([config.export_format for config in configs], output.expanduser(), force)
    wanted = GivenInputs(
        text=text or (), image=image or (), audio=audio or (), specs=given or (), file=inputs
    )
    source: dict[str, Any] = {
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "gguf_file": gguf_file,
    }
    stages = Stages(stderr(), quiet=quiet)

    loaded, task, sample, processor = _prepare(stages, model, task, dtype, wanted, generate, source)
    exported = _exported(stages, loaded, sample, configs, generation)
    results = []
    for name, one in exported.items():
        with stages.stage(f"Saving {name}"):
            one.save_pretrained(targets[name], processor=processor)
        report = _verified(stages, name, targets[name], loaded, sample, trust_remote_code) if verify else None
        results.append(_result(name, targets[name], one, report))
    document = {
        "model": model,
        "architecture": type(loaded).__name__,
        "task": task,
        "parameters": loaded.num_parameters(),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in loaded.parameters()),
        "exports": results,
        "stages": [{"stage": name, "seconds": seconds} for name, seconds in stages.seconds],
        "cpu_seconds": round(time.process_time() - started, 2),
    }
    passed = all(result["verification"] is None or result["verification"]["passed"] for result in results)
    return Outcome(document, lambda console: _show(console, document), passed)


def _prepare(
    stages: Stages,
    name: str,
    task: str | None,
    dtype: str | None,
    wanted: GivenInputs,
    generates: bool,
    source: Mapping[str, Any],
) -> tuple[Any, str | None, dict[str, Any], Any]:
    """The model, its task, inputs to trace it with, and its processor."""
    from polyport.samples import check_source

    check_source(
        name, source["gguf_file"]
    )  # a misspelt name shall not cost the seconds that the imports take
    with stages.stage("Importing PyTorch and transformers"):
        import torch  # noqa: F401 - seconds that would else be charged to the model
        import transformers  # noqa: F401
    hide_loading_bars()
    with stages.stage("Loading the model", bars=not Path(name).is_dir()):
        from polyport.samples import load_model

        model, task = load_model(name, task, dtype=dtype, generates=generates, **source)
    with stages.stage("Making sample inputs"):
        make = wanted.for_generation if generates else wanted.for_model
        inputs, processor = make(model, name, task, **source)
    return model, task, inputs, processor


def _exported(
    stages: Stages,
    model: Any,
    sample: Mapping[str, Any],
    configs: Sequence[Any],
    generation: Generation | None,
) -> dict[str, Any]:
    if generation is not None:
        return generation.export(stages, model, sample, configs)
    import polyport

    return polyport.export(model, sample, configs, plugins=[pipeline_progress(stages)])


def _targets(formats: Sequence[str], output: Path, force: bool) -> dict[str, Path]:
    """Format -> folder, all of them free or allowed to be replaced."""
    targets = {name: output / name if len(formats) > 1 else output for name in formats}
    for path in targets.values():
        if path.exists() and not path.is_dir():
            raise ExportError(f"{path} is a file; an export needs a folder.", stage="save")
        if not force and path.is_dir() and any(path.iterdir()):
            raise ExportError(
                f"{path} is not empty. Choose another folder, or replace the export in it with --force (other files in "
                "it stay).",
                stage="save",
            )
    return targets


def _verified(
    stages: Stages, name: str, target: Path, model: Any, sample: Mapping[str, Any], trust: bool
) -> dict[str, Any]:
    """What was saved, loaded as its users will load it and compared with the model."""
    from polyport import ExportedModel

    with stages.stage(f"Verifying {name}"):
        saved = ExportedModel.from_pretrained(target, trust_remote_code=trust, local_files_only=True)
        return saved.verify(model, sample).to_dict()


def _result(name: str, target: Path, exported: Any, report: dict[str, Any] | None) -> dict[str, Any]:
    from polyport.storage import read_manifest

    metadata = [component.metadata.to_dict() for component in exported.components.values()]
    files = [
        {"name": file, "size": (target / file).stat().st_size} for file in read_manifest(target).file_names()
    ]
    return {
        "format": name,
        "directory": str(target),
        "files": files,
        "bytes": sum(file["size"] for file in files),
        "components": list(exported.components),
        "generation": None if exported.generation is None else exported.generation.to_dict(),
        "inputs": [info for one in metadata for info in one["inputs"]],
        "outputs": [info for one in metadata for info in one["outputs"]],
        "axes": {axis: limits for one in metadata for axis, limits in one["axes"].items()},
        "patches": [patch for one in metadata for patch in one["patches"]],
        "verification": report,
    }


def _show(console: Console, document: Mapping[str, Any]) -> None:
    weights = document["parameter_bytes"]
    for result in document["exports"]:
        report = result["verification"]
        axes = ", ".join(render.axis_range(name, limits) for name, limits in result["axes"].items())
        proof = "not verified" if report is None else render.worst(report)
        render.lines(
            console,
            [
                (result["format"], result["directory"]),
                ("  size", f"{render.size(result['bytes'])} (parameters: {render.size(weights)})"),
                ("  components", ", ".join(result["components"]) if result["generation"] else None),
                ("  axes", axes or "none varies"),
                (
                    "  proof",
                    proof
                    if report is None
                    else render.verdict(report["passed"], f"same: {proof}", f"DIFFERS: {proof}"),
                ),
            ],
        )
        if report is not None and not report["passed"]:
            console.print(render.verification(report))
    console.print(f"{document['cpu_seconds']:.1f} CPU seconds", markup=False)
