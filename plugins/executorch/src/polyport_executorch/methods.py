"""The methods of a program."""

from __future__ import annotations

#: Computes.
METHOD = "forward"

#: Gives out the buffers in which caches are kept.
STATE = "state"
