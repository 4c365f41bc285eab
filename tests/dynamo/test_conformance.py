from typing import ClassVar

from polyport.testing import BackendConformance


class TestConformance(BackendConformance):
    format = "dynamo"
    # the graph runs the same kernels; half precisions may fuse differently
    tolerances: ClassVar = {
        "float32": (1e-5, 1e-5),
        "float64": (1e-9, 1e-9),
        "float16": (1e-2, 1e-2),
        "bfloat16": (2e-2, 2e-2),
    }
