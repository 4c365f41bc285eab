"""Patches of upstream libraries that tracing needs, one module per fault."""

from __future__ import annotations

from polyport.patching import GraphFix, Patch
from polyport_dynamo.fixes import (
    asserts,
    ceilings,
    chunks,
    convolutions,
    delta,
    grids,
    integers,
    paddings,
    pieces,
    positions,
    recurrence,
    rope,
    windows,
)

#: All of them, in the order in which they are applied.
PATCHES: tuple[Patch | GraphFix, ...] = (
    integers.PATCH,
    positions.PATCH,
    pieces.PATCH,
    *windows.PATCHES,
    *grids.PATCHES,
    chunks.PATCH,
    *recurrence.PATCHES,
    *delta.PATCHES,
    convolutions.PATCH,
    paddings.PATCH,
    *rope.PATCHES,
    asserts.FIX,
    ceilings.FIX,
)
