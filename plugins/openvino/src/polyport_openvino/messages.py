"""What OpenVINO raises, as one readable paragraph."""

from __future__ import annotations

import re

_PLACES = re.compile(
    r"Exception from [^\s:]+:\d+:?|Check '(?P<condition>.*?)' failed at [^\s:]+:\d+:?", re.DOTALL
)

#: Enough for any reason; beyond are dumps of graphs.
_LONGEST = 600


def reason(error: BaseException) -> str:
    """What an error of OpenVINO's says, without the places in its sources where it was raised.

    Args:
        error: The error.
    """
    text = str(error)
    said = " ".join(_PLACES.sub(" ", text).split())
    if not said:
        checks = [found["condition"] for found in _PLACES.finditer(text) if found["condition"]]
        said = f"check failed: {' '.join(checks[-1].split())}" if checks else type(error).__name__
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."
