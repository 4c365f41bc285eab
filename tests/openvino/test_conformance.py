from typing import ClassVar

from polyport.testing import BackendConformance


class TestConformance(BackendConformance):
    format = "openvino"
    tolerances: ClassVar = {"float32": (1e-4, 1e-4), "float16": (2e-2, 2e-2)}
