"""Options that several commands share, so that they mean the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_INPUTS = "Inputs"
_SOURCE = "Where things come from"
_OUTPUT = "Output"

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a model, or its id on the Hub.")]
Export = Annotated[
    str, typer.Argument(metavar="DIR", help="Folder of an export, or the id of one on the Hub.")
]

Text = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        metavar="TEXT",
        help="A text for the tokenizer; again for more rows.",
        rich_help_panel=_INPUTS,
    ),
]
Image = Annotated[
    list[Path] | None,
    typer.Option(
        "--image", metavar="FILE", help="A picture for the image processor.", rich_help_panel=_INPUTS
    ),
]
Audio = Annotated[
    list[Path] | None,
    typer.Option(
        "--audio", metavar="FILE", help="A sound for the feature extractor.", rich_help_panel=_INPUTS
    ),
]
Input = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=VALUE",
        help="One input by hand: input_ids=[[1,2,3]] or pixel_values=@file.npy.",
        rich_help_panel=_INPUTS,
    ),
]
Inputs = Annotated[
    Path | None,
    typer.Option(
        "--inputs",
        metavar="FILE",
        help="Inputs from a .safetensors, .npz or .json file.",
        rich_help_panel=_INPUTS,
    ),
]

Task = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="TASK",
        help="What the model is for (text-classification, causal-lm...); by default what it was saved as.",
        rich_help_panel=_SOURCE,
    ),
]
GgufFile = Annotated[
    str | None,
    typer.Option(
        "--gguf-file",
        metavar="NAME",
        help="A GGUF file in MODEL to take everything from; its weights are dequantized.",
        rich_help_panel=_SOURCE,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision", metavar="REV", help="Branch, tag or commit on the Hub.", rich_help_panel=_SOURCE
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Let code and pickled content from the source run.",
        rich_help_panel=_SOURCE,
    ),
]
Subfolder = Annotated[
    str,
    typer.Option(
        "--subfolder",
        metavar="NAME",
        help="Folder of the export in DIR, or in its repository.",
        rich_help_panel=_SOURCE,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="DEVICE", help="cpu, cuda, cuda:1, xpu...; the backend's default if left out."
    ),
]

Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Say nothing but results and errors.", rich_help_panel=_OUTPUT)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.", rich_help_panel=_OUTPUT)]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show tracebacks and what the libraries say.", rich_help_panel=_OUTPUT)
]
