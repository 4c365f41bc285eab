"""The pluggy markers of this project: what plugin authors decorate their hook implementations with.

Example::

    from polyport.markers import hookimpl

    @hookimpl
    def polyport_lower(traced, config):
        ...
"""

from __future__ import annotations

import pluggy

#: Name that pluggy keeps the hook markers apart by.
PROJECT_NAME = "polyport"

#: Marks a specification (core only).
hookspec = pluggy.HookspecMarker(PROJECT_NAME)

#: Marks an implementation (core's defaults and every plugin).
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)
