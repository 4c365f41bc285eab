"""Measurements in processes of their own, and what a process can say about itself (Linux)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

#: One thread for everything, and no network.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def measure(script: Path, *arguments: str) -> Any:
    """What a script prints in its last line, as JSON, when it is run with `--worker` in a process of its own.

    Args:
        script: The script.
        arguments: What follows `--worker`.
    """
    command = [sys.executable, "-W", "ignore", str(script), "--worker", *arguments]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script.name} {' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def resident() -> int:
    """Memory of this process that is in use."""
    return _status("VmRSS:")


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
