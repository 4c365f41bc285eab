"""What is around every command: errors in words, exit codes, quiet libraries, and output as text or JSON."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import typer
from rich.console import Console
from rich.text import Text

from polyport.errors import PolyportError, VerificationError

#: Exit codes.
OK, MISMATCH, ERROR, INTERRUPTED = 0, 1, 2, 130

#: Width of tables where there is no terminal to ask.
_WIDTH = 160


@attrs.frozen
class Outcome:
    """What a command found out.

    Args:
        document: It all, as JSON values, for `--json`.
        show: Prints it for people.
        passed: Whether the verdict is good; the exit code otherwise says that it isn't.
    """

    document: Mapping[str, Any]
    show: Callable[[Console], None]
    passed: bool = True


def command(function: Callable[..., Outcome]) -> Callable[..., None]:
    """Make a function that returns an `Outcome` into a command.

    Args:
        function: Takes the options, among them `as_json` and `debug`.

    Returns:
        A function of the same signature that prints and raises `typer.Exit`.
    """

    @functools.wraps(function)
    def run(**options: Any) -> None:
        as_json, debug = options["as_json"], options["debug"]
        said: list[str] = []
        try:
            with _libraries(debug, said):
                outcome = function(**options)
            if as_json:
                document = {**outcome.document, "passed": outcome.passed, "warnings": said}
                typer.echo(_json(document))
            else:
                outcome.show(stdout())
        except (typer.Exit, typer.Abort):
            raise
        except BaseException as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # whoever read our output has gone; typer ends quietly
            if not isinstance(error, (Exception, KeyboardInterrupt)):
                raise
            raise typer.Exit(_report(error, as_json, debug)) from error
        if not outcome.passed:
            raise typer.Exit(MISMATCH)

    # the wrapper takes keywords only, and says nothing; what typer reads is the signature it wraps
    run.__annotations__ = {**function.__annotations__, "return": None}
    return run


class _Muted:
    """A stream that takes everything and shows nothing; its `real` stream is for what polyport itself has to say."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """Do nothing."""

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class _Aside(_Muted):
    """Muted too, but what is written to it is seen on stderr."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)


def stdout() -> Console:
    """The console for results, also while libraries are muted."""
    return _console(getattr(sys.stdout, "real", sys.stdout))


def stderr() -> Console:
    """The console for everything else, also while libraries are muted."""
    return _console(getattr(sys.stderr, "real", sys.stderr))


def _console(file: Any) -> Console:
    console = Console(file=file, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH
    return console


def say(kind: str, style: str, message: str) -> None:
    """Print one paragraph to stderr, wrapped at words on a terminal and as one line elsewhere."""
    console = stderr()
    console.print(Text.assemble((f"{kind}: ", style), message), soft_wrap=not console.is_terminal)


def _report(error: BaseException, as_json: bool, debug: bool) -> int:
    """Print an error in one paragraph; returns the exit code."""
    code, message = _in_words(error)
    if debug:
        traceback.print_exception(error)
    say("error", "bold red", message)
    if as_json:
        details = {"type": type(error).__name__, "message": message}
        for name in ("stage", "backend"):
            if (value := getattr(error, name, None)) is not None:
                details[name] = str(value)
        typer.echo(_json({"error": details, "exit_code": code}))
    return code


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(_finite(document), indent=2, ensure_ascii=False, default=str)


def _finite(value: Any) -> Any:
    """The value with `nan` and infinities as text: JSON has no numbers for them, and strict readers refuse the rest."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _in_words(error: BaseException) -> tuple[int, str]:
    """The exit code for an error, and what to tell people."""
    if isinstance(error, PolyportError):
        message = " ".join(str(error).split())
        return (MISMATCH if isinstance(error, VerificationError) else ERROR), message
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "Interrupted. Nothing half written was left behind."
    if isinstance(error, MemoryError):
        return ERROR, "Memory ran out. A smaller sample, or a machine with more memory, may do."
    if isinstance(error, OSError) and error.strerror:
        return ERROR, f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    first = next(iter(str(error).strip().splitlines()), "")
    return ERROR, (
        f"{type(error).__name__}: {first} This is a fault of polyport or of a library it uses, not yours: run the command "
        "with --debug and report what it prints."
    )


@contextlib.contextmanager
def _libraries(debug: bool, said: list[str]) -> Iterator[None]:
    """Keep libraries' warnings, log lines and progress bars off the terminal; show our own warnings as one line each.

    Args:
        debug: Leave everything as it is.
        said: Gets the texts of our own warnings.
    """
    if debug:
        with contextlib.redirect_stdout(_Aside(sys.stdout)):  # nothing but the result may end up in stdout
            yield
        return
    before, bars = logging.root.manager.disable, os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS")
    logging.disable(logging.ERROR)
    if not sys.stderr.isatty():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        text = " ".join(str(message).split())
        if text not in said:
            said.append(text)
            say("warning", "yellow", text)

    try:
        # some print whole graphs, to stdout and stderr, before they raise
        out, err = _Muted(sys.stdout), _Muted(sys.stderr)
        with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", category=UserWarning, module=r"polyport(_\w+)?(\.|$)")
            warnings.showwarning = show
            yield
    finally:
        logging.disable(before)
        if bars is None:
            os.environ.pop("HF_HUB_DISABLE_PROGRESS_BARS", None)
