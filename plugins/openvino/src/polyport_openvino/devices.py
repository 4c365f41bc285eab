"""OpenVINO's core, and the names of its devices."""

from __future__ import annotations

import functools

import openvino as ov


@functools.cache
def core() -> ov.Core:
    """The runtime: one for all models of a process."""
    return ov.Core()
