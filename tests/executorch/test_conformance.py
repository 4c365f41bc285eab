from typing import ClassVar

import pytest

from polyport.testing import BackendConformance

# in one worker, which makes each export once: they are what takes long
pytestmark = pytest.mark.xdist_group("executorch conformance")


class TestConformance(BackendConformance):
    format = "executorch"
    generation_options: ClassVar = {"max_sizes": {"batch": 9}}
    tolerances: ClassVar = {"float32": (1e-4, 1e-4), "float16": (2e-2, 2e-2)}
