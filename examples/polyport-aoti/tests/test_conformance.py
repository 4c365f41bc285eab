from typing import ClassVar

import pytest

from polyport.testing import BackendConformance


@pytest.mark.slow  # it compiles C++
class TestConformance(BackendConformance):
    format = "aoti"
    tolerances: ClassVar = {"float32": (1e-4, 1e-4)}
    # the compiler writes the path of its cache into the code
    deterministic_bytes = False
    # machine code
    loading_needs_trust = True
