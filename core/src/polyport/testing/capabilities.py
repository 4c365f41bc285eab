"""Tests that only apply to some backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Test = TypeVar("_Test", bound=Callable[..., Any])

_NEEDS = "_polyport_needs"


def needs(**capabilities: bool) -> Callable[[_Test], _Test]:
    """Mark a standard test as one for backends with these capabilities.

    For any other backend it is not collected at all: a skipped test would say that something is left to do.
    """

    def mark(test: _Test) -> _Test:
        setattr(test, _NEEDS, capabilities)
        return test

    return mark


def does_not_apply(suite: type, test: Any) -> bool:
    """Whether the capabilities that a suite declares leave a standard test out."""
    wanted = getattr(test, _NEEDS, {})
    return any(getattr(suite, name) != value for name, value in wanted.items())
