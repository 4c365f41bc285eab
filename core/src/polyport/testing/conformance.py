"""The conformance suite: one class to subclass, and you know whether your backend is right."""

from __future__ import annotations

import inspect
from typing import Any

from polyport.testing.artifact_tests import ArtifactTests
from polyport.testing.call_tests import CallTests
from polyport.testing.capabilities import does_not_apply
from polyport.testing.generation_tests import GenerationTests
from polyport.testing.leftover_tests import LeftoverTests
from polyport.testing.plugin_tests import PluginTests
from polyport.testing.result_tests import ResultTests


class BackendConformance(PluginTests, ResultTests, CallTests, GenerationTests, ArtifactTests, LeftoverTests):
    """Tests that every backend of polyport passes.

    Subclass it in a test module of your distribution, and run pytest::

        from polyport.testing import BackendConformance

        class TestConformance(BackendConformance):
            format = "onnx"
            tolerances = {"float32": (1e-4, 1e-4), "float16": (1e-2, 1e-2)}

    A test that can't pass yet is overridden with `@pytest.mark.xfail(strict=True, reason="<link>")` and a call of `super()`;
    anything else that hides a test makes the suite fail. New releases of polyport may add tests, so pin the release you test
    against.

    Attributes:
        format: The format, as in your entry point.
        config_options: Options of your config for every export of the suite (`dynamic` comes from `supports_dynamic`).
        generation_options: Options besides, of exports for generation: of one row as the sample, and run with up to 9.
        tolerances: dtype of an output -> (atol, rtol) in which it must agree with the model. `"float32"` is always tested;
            a model is exported in each further dtype.
        examples: Names of the models in `polyport.testing.models.EXAMPLES` to export: all of them, unless one can't be.
        supports_dynamic: Whether sizes may vary after an export.
        deterministic_bytes: Whether two exports of one model give the same bytes.
        loading_needs_trust: Whether the files hold code, so that loading them needs `trust_remote_code=True`.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, test in standard_tests().items():
            if does_not_apply(cls, test):
                setattr(cls, name, None)

    def test_no_standard_test_is_hidden(self) -> None:
        """The subclass runs every standard test that its capabilities call for.

        On failure: rename your own test, or mark the override with `xfail(strict=True, reason=...)`, so that everyone sees
        what doesn't work, and notices when it does.
        """
        hidden = []
        for name, test in standard_tests().items():
            found = getattr(type(self), name, None)
            if found is test or does_not_apply(type(self), test):
                continue
            marks = [mark for mark in getattr(found, "pytestmark", ()) if mark.name == "xfail"]
            if not any(mark.kwargs.get("strict") and mark.kwargs.get("reason") for mark in marks):
                hidden.append(name)
        assert not hidden, f"{type(self).__name__} hides {', '.join(hidden)}"


def standard_tests() -> dict[str, Any]:
    """Name -> function, of every test of the suite."""
    return {name: test for name, test in inspect.getmembers(BackendConformance) if name.startswith("test_")}
