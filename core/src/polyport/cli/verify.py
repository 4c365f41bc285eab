"""`polyport verify`: does an export compute what the model computes?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from polyport.cli import options, render
from polyport.cli.exports import load
from polyport.cli.frame import Outcome, stderr
from polyport.cli.inputs import GivenInputs
from polyport.cli.progress import Stages, hide_loading_bars


def verify(
    directory: options.Export,
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="The original: its folder, or its id on the Hub.")
    ],
    atol: Annotated[
        float | None,
        typer.Option("--atol", help="Absolute tolerance; by default that of each output's dtype.", min=0),
    ] = None,
    rtol: Annotated[float | None, typer.Option("--rtol", help="Relative tolerance, likewise.", min=0)] = None,
    text: options.Text = None,
    image: options.Image = None,
    audio: options.Audio = None,
    given: options.Input = None,
    inputs: options.Inputs = None,
    device: options.Device = None,
    subfolder: options.Subfolder = "",
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,  # noqa: ARG001 - read by the frame
    debug: options.Debug = False,  # noqa: ARG001
) -> Outcome:
    """Compare an export with the original model, output by output, at the sample's sizes and at others."""
    stages = Stages(stderr(), quiet=quiet)
    wanted = GivenInputs(
        text=text or (), image=image or (), audio=audio or (), specs=given or (), file=inputs
    )
    source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    with stages.stage("Loading the export"):
        exported, _ = load(directory, subfolder, device=device, trust=trust_remote_code)
    with stages.stage("Loading the model", bars=not Path(model).is_dir()):
        from polyport.samples import load_model

        hide_loading_bars()
        metadata = next(iter(exported.components.values())).metadata
        generation = exported.generation
        original, task = load_model(
            model,
            architecture=generation.architecture if generation else metadata.architecture,
            dtype=metadata.export_dtype,
            **source,
        )
    with stages.stage("Making sample inputs"):
        make = wanted.for_generation if generation else wanted.for_model
        sample, _ = make(original, model, task, **source)
    with stages.stage("Comparing"):
        report = exported.verify(original, sample, atol=atol, rtol=rtol).to_dict()
    document = {"directory": directory, "model": model, "format": exported.export_format, **report}
    return Outcome(document, lambda console: _show(console, report), report["passed"])


def _show(console: Console, report: dict[str, Any]) -> None:
    console.print(render.verification(report))
    words = render.worst(report)
    console.print(render.verdict(report["passed"], f"Same: {words}.", f"DIFFERS: {words}."))
