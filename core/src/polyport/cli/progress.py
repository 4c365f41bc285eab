"""What the command line says while it works: one line for each stage, with a spinner where somebody watches."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from polyport.progress import Progress as PipelineProgress


class Stages:
    """Says which stage is running, and keeps how long each took.

    Args:
        console: Where to say it (stderr).
        quiet: Say nothing.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console, self._quiet = console, quiet
        self.seconds: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def stage(self, doing: str, *, bars: bool = False) -> Iterator[None]:
        """Announce a stage while the block runs, and its duration after it.

        Args:
            doing: What is being done, as in "Loading the model".
            bars: Let libraries draw their own bars in place of the spinner, as for downloads.
        """
        started = time.perf_counter()
        with self._bars() if bars and self._watched else self._spinner(doing):
            yield
        took = time.perf_counter() - started
        self.seconds.append((doing, round(took, 3)))
        if not self._quiet:
            self._console.print(f"{doing:<44}{took:8.1f} s", markup=False)

    @property
    def _watched(self) -> bool:
        return self._console.is_terminal and not self._quiet

    def _bars(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.redirect_stderr(self._console.file)

    @contextlib.contextmanager
    def _spinner(self, doing: str) -> Iterator[None]:
        if not self._watched:
            yield
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        # stdout and stderr are redirected by the command already: a second redirection would print results twice
        with Progress(
            *columns, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False
        ) as progress:
            progress.add_task(doing, total=None)
            yield


#: Stage of an export -> what to say of it.
_DOING = {
    "capture": "Finding the axes that vary",
    "trace": "Tracing the model",
    "lower": "Lowering to {format}",
    "quantize graph": "Quantizing the graph for {format}",
    "quantize program": "Quantizing the program for {format}",
}


def pipeline_progress(stages: Stages) -> PipelineProgress:
    """The plugin that announces the stages of an export.

    Args:
        stages: Where to announce them.
    """
    return PipelineProgress(lambda stage, name: stages.stage(_DOING[stage].format(format=name)))


def hide_loading_bars() -> None:
    """Switch off the bars that transformers draws while it loads weights: the spinner says the same."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
