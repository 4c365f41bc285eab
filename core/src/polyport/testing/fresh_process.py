"""Running code in a process that knows nothing of this one: no model built, no module imported, no network."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

#: Seconds after which a process is given up: loading and running small models takes a few.
_TIMEOUT = 600


@attrs.frozen
class Job:
    """A saved export, and the calls to make of it.

    Args:
        directory: Where it is.
        cases: Calls, by name.
        trust: Whether it needs trust to be loaded.
    """

    directory: Path
    cases: Mapping[str, Mapping[str, Any]]
    trust: bool


@attrs.frozen
class Answer:
    """What a call returned: the class of the output and its leaves by name; or what it raised."""

    cls: str
    leaves: Mapping[str, Any]
    error: str = ""


def python(code: str, *arguments: str, **environment: str) -> str:
    """Run Python code in a new interpreter that finds the same distributions as this one.

    Args:
        code: What to run.
        arguments: Its `sys.argv[1:]`.
        environment: More environment variables.

    Returns:
        What it printed.
    """
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    command = [sys.executable, "-P", "-c", code, *arguments]
    done = subprocess.run(  # noqa: S603  our own interpreter with our own code
        command, env=variables, capture_output=True, text=True, timeout=_TIMEOUT, check=False
    )
    assert done.returncode == 0, (
        f"a fresh process ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout


def run_jobs(jobs: Mapping[str, Job], folder: Path) -> dict[str, dict[str, Answer]]:
    """Load exports in one fresh process, and call them there.

    Args:
        jobs: The exports, by name.
        folder: Where the inputs and the answers are put.

    Returns:
        For every export, the answer of each of its cases.
    """
    import torch

    questions, answers = folder / "questions.pt", folder / "answers.pt"
    plain = {
        name: {
            "directory": str(job.directory),
            "trust": job.trust,
            "cases": {k: dict(v) for k, v in job.cases.items()},
        }
        for name, job in jobs.items()
    }
    torch.save(plain, questions)
    python("from polyport.testing.fresh_process import answer; answer()", str(questions), str(answers))
    found = torch.load(answers, weights_only=True)
    return {name: {case: Answer(**values) for case, values in cases.items()} for name, cases in found.items()}


def answer() -> None:
    """What the fresh process does: read the questions, call the exports, write the answers."""
    import torch

    questions = torch.load(sys.argv[1], weights_only=True)
    torch.save({name: _answers(job) for name, job in questions.items()}, sys.argv[2])


def _answers(job: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    from polyport import ExportedModel, structure

    answers: dict[str, dict[str, Any]] = {}
    for case, kwargs in job["cases"].items():
        try:
            exported = ExportedModel.from_pretrained(job["directory"], trust_remote_code=job["trust"])
            output = exported(**kwargs)
            answers[case] = {
                "cls": type(output).__qualname__,
                "leaves": dict(structure.flatten_named(output)),
            }
        except Exception as error:  # noqa: BLE001  whatever it is, the other process reports it
            answers[case] = {"cls": "", "leaves": {}, "error": f"{type(error).__name__}: {error}"}
    return answers
