"""Tests for people who write backends and fixes: `pip install "polyport[testing]"`.

`BackendConformance` is subclassed by the tests of a backend, `check_patch` is called with each patch and graph fix.
"""

from __future__ import annotations

import pytest

# so that a failed assertion of the suite shows its values, as one in a test module does
pytest.register_assert_rewrite(
    *(f"polyport.testing.{name}_tests" for name in ("artifact", "call", "leftover", "plugin", "result")),
    "polyport.testing.conformance",
    "polyport.testing.patches",
    "polyport.testing.workbench",
)

from polyport.testing.conformance import BackendConformance  # noqa: E402
from polyport.testing.patches import check_patch  # noqa: E402

__all__ = ["BackendConformance", "check_patch"]
