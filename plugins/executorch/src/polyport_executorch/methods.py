"""The methods of a program."""

from __future__ import annotations

#: Computes.
METHOD = "forward"

#: Gives out the buffers in which caches are kept.
STATE = "state"


def method_of(component: str, method: str) -> str:
    """The name that a method has in a file with several components.

    Args:
        component: Name of the component.
        method: What it is called in a file of its own.
    """
    return component if method == METHOD else f"{component}_{method}"
