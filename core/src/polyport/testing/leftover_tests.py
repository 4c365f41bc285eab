"""After an export, whether it succeeded, failed or was interrupted, everything is as it was."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from polyport.artifact import ExportedModel
from polyport.errors import PolyportError
from polyport.testing.interrupting import After, Midway
from polyport.testing.leftovers import Caller, Upstream
from polyport.testing.models import EXAMPLES
from polyport.testing.suite import Suite
from polyport.testing.workbench import Workbench


class LeftoverTests(Suite):
    """Patches undone, model and inputs untouched."""

    #: The example that these tests export, again and again: the smallest.
    _SMALL = "image"

    def _midway(self, workbench: Workbench, error: BaseException) -> Any:
        workbench.exported(self._small)  # which counts the calls
        return Midway(workbench.package, max(workbench.calls[self._small] // 3, 1), error)

    @property
    def _small(self) -> str:
        return self._SMALL if self._SMALL in self.examples else self.examples[0]

    def test_export_leaves_everything_as_it_was(self, workbench: Workbench) -> None:
        """torch, transformers, torch's modes, the model and the inputs are the same objects with the same values after.

        The export follows one that failed, and is right all the same.

        On failure: replace upstream functions through `polyport_patch` only: core puts them back. Lower a copy of
        `traced.program`, whose weights are the caller's. Keep nothing half-built between exports.
        """
        check = _Check(workbench, self._small)
        with pytest.raises((RuntimeError, PolyportError)):
            check.run(self._midway(workbench, RuntimeError("broken")))
        exported = check.run()
        kwargs = workbench.cases(self._small)["sample's sizes"]
        workbench.assert_same(workbench.expected(self._small, kwargs), exported(**kwargs))
        check.nothing_left()

    @pytest.mark.parametrize(
        "error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"]
    )
    @pytest.mark.parametrize("stage", ["capture", "trace", "lower"])
    def test_failed_export_leaves_everything_as_it_was(
        self, workbench: Workbench, stage: str, error: BaseException
    ) -> None:
        """The same when an error or Ctrl-C ends the export after capturing, after tracing, or in the middle of lowering.

        On failure: as above. Where you change something for a while yourself, use a `with` or `try`/`finally`: a
        KeyboardInterrupt can come at any call.
        """
        plugin = self._midway(workbench, error) if stage == "lower" else After(stage, error)
        check = _Check(workbench, self._small)
        with pytest.raises((type(error), PolyportError)):
            check.run(plugin)
        check.nothing_left()


class _Check:
    """A model, its inputs, and what they and the libraries were before."""

    def __init__(self, workbench: Workbench, example: str) -> None:
        workbench.exported(example)  # libraries set themselves up at the first export
        self.workbench, self.example = workbench, EXAMPLES[example]
        self.model, inputs = self.example.build(), self.example.sample()
        self.inputs = inputs
        self.caller, self.upstream = Caller(self.model, inputs), Upstream(workbench.modes)

    def run(self, *plugins: Any) -> ExportedModel:
        return self.workbench.export(
            self.model, attrs.evolve(self.example, sample=lambda: self.inputs), plugins
        )

    def nothing_left(self) -> None:
        left = [*self.caller.changes(), *self.upstream.changes()]
        assert not left, "\n".join(left[:20])
