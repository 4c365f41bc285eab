"""Plugins that end an export at a chosen point, as an error or Ctrl-C would."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from polyport.markers import hookimpl


class After:
    """Ends an export after a stage.

    Args:
        stage: `"capture"` or `"trace"`.
        error: What is raised.
    """

    def __init__(self, stage: str, error: BaseException) -> None:
        self.stage, self.error = stage, error

    @hookimpl(wrapper=True)
    def polyport_capture(self) -> Generator[None, Any, Any]:
        """See `polyport.hookspecs`."""
        return (yield from self._end("capture"))

    @hookimpl(wrapper=True)
    def polyport_trace(self) -> Generator[None, Any, Any]:
        """See `polyport.hookspecs`."""
        return (yield from self._end("trace"))

    def _end(self, stage: str) -> Generator[None, Any, Any]:
        result = yield
        if stage == self.stage:
            raise self.error
        return result


class CountCalls:
    """Counts the calls of a package's own functions during lowering.

    Args:
        package: The package.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        self.calls = 0

    @hookimpl(wrapper=True)
    def polyport_lower(self) -> Generator[None, Any, Any]:
        """See `polyport.hookspecs`."""
        with _watched(self.package, self._count):
            return (yield)

    def _count(self) -> None:
        self.calls += 1


class Midway:
    """Ends an export in the middle of the backend's lowering, at one call of the package's own functions.

    Only there: an error in the middle of torch's code would test torch.

    Args:
        package: The package.
        call: The number of the call at which it ends.
        error: What is raised.
    """

    def __init__(self, package: str, call: int, error: BaseException) -> None:
        self.package, self.error = package, error
        self._left = call

    @hookimpl(wrapper=True)
    def polyport_lower(self) -> Generator[None, Any, Any]:
        """See `polyport.hookspecs`."""
        with _watched(self.package, self._count):
            result = yield
        if self._left > 0:
            raise self.error  # the backend calls nothing of its own here
        return result

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise self.error


@contextmanager
def _watched(package: str, called: Callable[[], None]) -> Iterator[None]:
    """Have a function called at each call of the package's functions; what it raises is raised there."""
    previous = sys.getprofile()

    def watch(frame: FrameType, event: str, argument: Any) -> None:  # noqa: ARG001  the signature is Python's
        if event == "call" and str(frame.f_globals.get("__name__", "")).partition(".")[0] == package:
            called()

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(previous)
