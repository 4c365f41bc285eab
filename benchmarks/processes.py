"""Measurements in processes of their own, and what a process can say about itself (Linux)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: One thread for everything, and no network.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def measure(script: Path, *arguments: str, python: str = sys.executable) -> Any:
    """What a script prints in its last line, as JSON, when it is run with `--worker` in a process of its own.

    Args:
        script: The script.
        arguments: What follows `--worker`.
        python: The interpreter that runs it.
    """
    command = [python, "-W", "ignore", str(script), "--worker", *arguments]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script.name} {' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def answering(script: Path, *arguments: str, python: str = sys.executable) -> Iterator[Callable[[Any], Any]]:
    """A process that answers one question after another and waits in between (`answer` is its side); yields what asks.

    Args:
        script: The script that it runs with `--worker`.
        arguments: What follows `--worker`.
        python: The interpreter that runs it.
    """
    command = [python, "-W", "ignore", str(script), "--worker", *arguments]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):

        def ask(question: Any) -> Any:
            if process.poll() is None and process.stdin and process.stdout:
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
                if line := process.stdout.readline():
                    return json.loads(line)
            errors.seek(0)
            raise SystemExit(f"{script.name} {' '.join(arguments)} failed:\n{errors.read()[-3000:]}")

        yield ask


def answer(answers: Callable[[Any], Any]) -> None:
    """Answer until there are no more questions (see `answering`); what libraries print goes to the errors.

    Args:
        answers: Question -> answer.
    """
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for line in sys.stdin:
            print(json.dumps(answers(json.loads(line))), file=out, flush=True)


def resident() -> int:
    """Memory of this process that is in use."""
    return _status("VmRSS:")


def private() -> int:
    """The part of `resident` that is no page of a file."""
    return _status("RssAnon:")


def peak() -> int:
    """The most memory that was in use since the process began, or since `reset_peak`."""
    return _status("VmHWM:")


def reset_peak() -> None:
    """Let `peak` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def table(head: list[str], rows: list[list[str]], words: int = 1) -> str:
    """A Markdown table whose first columns hold words and the others numbers.

    Args:
        head: Titles of the columns.
        rows: Cells.
        words: How many columns hold words.
    """
    ruler = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join(
        [f"| {' | '.join(head)} |", f"|{'|'.join(ruler)}|", *(f"| {' | '.join(row)} |" for row in rows)]
    )
