"""The commands, put together. Importing this must stay quick: commands import what they need when they run."""

from __future__ import annotations

from typing import Annotated

import typer

from polyport.__about__ import __version__
from polyport.cli import backends, export, generate, inspect, run, verify
from polyport.cli.frame import command

app = typer.Typer(
    name="polyport",
    help="Export Hugging Face models to the runtimes they are deployed on, prove that they compute the same, and run "
    "them there.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"polyport {__version__}")
        raise typer.Exit


@app.callback()
def _polyport(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Export Hugging Face models to the runtimes they are deployed on, and run them there."""


app.command("export")(command(export.export))
app.command("run")(command(run.run))
app.command("generate")(command(generate.generate))
app.command("verify")(command(verify.verify))
app.command("inspect")(command(inspect.inspect))
app.command("backends")(command(backends.backends))
