"""Watching an export: which stage runs, and how long each took.

An ordinary plugin made of hook wrappers, the way a third party would write one::

    polyport.export(model, inputs, configs, plugins=[Progress(lambda stage, seconds: print(stage, seconds))])
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from typing import Any

from polyport.markers import hookimpl

logger = logging.getLogger(__name__)

#: Called with the stage's name and None when it begins, and with its wall-clock seconds when it has ended.
Report = Callable[[str, float | None], None]


class Progress:
    """Reports the beginning and the end of every stage.

    Args:
        report: What to call; by default, stages are logged at INFO when they end.
    """

    def __init__(self, report: Report | None = None) -> None:
        self._report = report or _log

    def _watched(self, stage: str) -> Generator[None, Any, Any]:
        self._report(stage, None)
        start = time.perf_counter()
        result = yield
        self._report(stage, time.perf_counter() - start)
        return result

    @hookimpl(wrapper=True)
    def polyport_capture(self) -> Generator[None, Any, Any]:
        return (yield from self._watched("capture"))

    @hookimpl(wrapper=True)
    def polyport_trace(self) -> Generator[None, Any, Any]:
        return (yield from self._watched("trace"))

    @hookimpl(wrapper=True)
    def polyport_lower(self) -> Generator[None, Any, Any]:
        return (yield from self._watched("lower"))

    @hookimpl(wrapper=True)
    def polyport_quantize(self, stage: str) -> Generator[None, Any, Any]:
        return (yield from self._watched(f"quantize {stage}"))

    @hookimpl(wrapper=True)
    def polyport_save(self) -> Generator[None, Any, Any]:
        return (yield from self._watched("save"))

    @hookimpl(wrapper=True)
    def polyport_load(self) -> Generator[None, Any, Any]:
        return (yield from self._watched("load"))


def _log(stage: str, seconds: float | None) -> None:
    if seconds is not None:
        logger.info("%s: %.2f s", stage, seconds)
