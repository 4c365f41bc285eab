"""The command line. `main` is the console script `polyport`."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line and end the process with its exit code: 0 right, 1 a mismatch, 2 an error, 130 Ctrl-C."""
    from polyport.cli.app import app

    app()
