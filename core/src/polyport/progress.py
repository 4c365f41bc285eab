"""Watching an export: which stage runs for which format, and how long each took.

An ordinary plugin made of hook wrappers, the way a third party would write one:
`polyport.export(model, inputs, configs, plugins=[Progress()])`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from polyport.config import ExportConfig
from polyport.markers import hookimpl

logger = logging.getLogger(__name__)

#: Called with the stage (`"capture"`, `"trace"`, `"lower"`, `"quantize graph"`, `"quantize program"`) and the format; what it
#: returns is entered when the stage begins and left when it ends, also with an error.
Watch = Callable[[str, str], AbstractContextManager[Any]]


class Progress:
    """Watches every stage of an export.

    Args:
        watch: What to enter around each stage; by default, stages are logged at INFO when they end.
    """

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch = watch or _logged

    @hookimpl(wrapper=True)
    def polyport_capture(self, config: ExportConfig) -> Generator[None, Any, Any]:
        with self._watch("capture", config.export_format):
            return (yield)

    @hookimpl(wrapper=True)
    def polyport_trace(self, config: ExportConfig) -> Generator[None, Any, Any]:
        with self._watch("trace", config.export_format):
            return (yield)

    @hookimpl(wrapper=True)
    def polyport_lower(self, config: ExportConfig) -> Generator[None, Any, Any]:
        with self._watch("lower", config.export_format):
            return (yield)

    @hookimpl(wrapper=True)
    def polyport_quantize(self, config: ExportConfig, stage: str) -> Generator[None, Any, Any]:
        with self._watch(f"quantize {stage}", config.export_format):
            return (yield)


@contextmanager
def _logged(stage: str, export_format: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    logger.info("%s (%s): %.2f s", stage, export_format, time.perf_counter() - start)
