"""What a patch and a graph fix are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    import torch


@attrs.frozen
class Target:
    """An attribute of an upstream module or class that a patch replaces.

    Args:
        path: `package.module:attribute` or `package.module:Class.attribute`. The module is imported only where the patch
            is applied, and a target whose module the installed version doesn't have is skipped when `optional`.
        make: Called with the attribute found on entry (of a class method, the function in it); returns what takes its
            place, a plain function for a static or class method too.
        optional: Whether the target may be missing.
    """

    path: str
    make: Callable[[Any], Any]
    optional: bool = False


@attrs.frozen(kw_only=True, eq=False)
class Patch:
    """A replacement of upstream attributes that is active only while a stage runs.

    Args:
        id: `<project>-<slug>`, recorded in the export's metadata.
        targets: What is replaced.
        reason: The fault as a user sees it, and why this replacement is right.
        upstream: Link to the upstream report, or `"unreported"`.
        affects: Distribution -> PEP 440 range of the versions that have the fault.
        reproduce: Raises while the fault is there, returns quietly once it is gone (or patched).
        applies: Tells from the model whether the patch is needed; by default it always is.
    """

    id: str
    targets: tuple[Target, ...]
    reason: str
    upstream: str
    affects: Mapping[str, str]
    reproduce: Callable[[], None]
    applies: Callable[[Any], bool] | None = None


@attrs.frozen(kw_only=True, eq=False)
class GraphFix:
    """A repair of a traced graph.

    Args:
        id: As of a patch.
        apply: Changes the program in place and returns whether it found something to change.
        reason: The fault as a user sees it, and why the repair is right.
        upstream: Link to the upstream report, or `"unreported"`.
        affects: Distribution -> PEP 440 range of the versions that have the fault.
        reproduce: Raises while the fault is there. Called with the fix (`apply`) or with a function that does nothing.
    """

    id: str
    apply: Callable[[torch.export.ExportedProgram], bool]
    reason: str
    upstream: str
    affects: Mapping[str, str]
    reproduce: Callable[[Callable[[torch.export.ExportedProgram], bool]], None]
