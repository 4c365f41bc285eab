"""What the tests of one suite share: models, and their exports, each made once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from polyport import structure
from polyport.artifact import ExportedModel
from polyport.discovery import find_backend
from polyport.exporter import AutoHfExporter
from polyport.testing.fresh_process import Answer, Job, run_jobs
from polyport.testing.interrupting import CountCalls
from polyport.testing.leftovers import modes
from polyport.testing.models import EXAMPLES, Example

T = TypeVar("T")


class Workbench:
    """Makes and keeps models, exports and saved exports for one backend.

    Exporting may take minutes (a compiler), so the tests share exports, and none of them changes one.

    Args:
        suite: The suite, for its capabilities.
        folder: A folder of its own.
    """

    def __init__(self, suite: Any, folder: Path) -> None:
        self.suite = suite
        self.folder = folder
        #: The package that the plugin is in.
        self.package = find_backend(suite.format).entry_point.module.partition(".")[0]
        #: Example -> how many calls of the plugin's own functions its lowering took.
        self.calls: dict[str, int] = {}
        #: torch's modes before the first export.
        self.modes = modes()
        self._made: dict[Any, Any] = {}

    def _once(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` returns, or the error it raises, the first time."""
        if key not in self._made:
            try:
                self._made[key] = make()
            except Exception as error:  # noqa: BLE001  kept, and raised for each test that needs the result
                self._made[key] = _Failed(error)
        value: T | _Failed = self._made[key]
        if isinstance(value, _Failed):
            raise value.error
        return value

    # ── models ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def model(self, example: str) -> Any:
        """The model, which no test may change."""
        return self._once(("model", example), EXAMPLES[example].build)

    def cases(self, example: str) -> dict[str, dict[str, Any]]:
        """The calls that an export of it must answer."""
        cases = EXAMPLES[example].cases()
        return cases if self.suite.supports_dynamic else {"sample's sizes": cases["sample's sizes"]}

    def expected(self, example: str, kwargs: Mapping[str, Any]) -> Any:
        """What the model itself answers."""
        with torch.no_grad():
            return self.model(example)(**kwargs)

    # ── exports ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def export(
        self, model: Any, example: Example, plugins: Sequence[Any] = (), **options: Any
    ) -> ExportedModel:
        """A new export."""
        config = self._config(options)
        exporter = AutoHfExporter.from_config(config)
        return exporter.export(model, example.sample(), config, plugins=plugins)

    def export_generation(self, model: Any, *settings: Any, **options: Any) -> ExportedModel:
        """A new export for generation, from the sample of the decoder."""
        config = self._config(self.suite.generation_options)
        exporter = AutoHfExporter.from_config(config)
        return exporter.export_for_generation(
            model, EXAMPLES["decoder"].sample(), config, *settings, **options
        )

    def _config(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "export_format": self.suite.format,
            "dynamic": self.suite.supports_dynamic,
            **self.suite.config_options,
            **options,
        }

    def exported(self, example: str) -> ExportedModel:
        """The export of a model."""

        def export() -> ExportedModel:
            counter = CountCalls(self.package)
            exported = self.export(self.model(example), EXAMPLES[example], [counter])
            self.calls[example] = counter.calls
            return exported

        return self._once(("export", example), export)

    def saved(self, example: str) -> Path:
        """The folder of the saved export, which no test may change."""

        def save() -> Path:
            folder = self.folder / f"saved {example}"  # a space: paths have them
            self.exported(example).save_pretrained(folder)
            return folder

        return self._once(("saved", example), save)

    def loaded(self, example: str) -> ExportedModel:
        """The saved export, loaded in this process."""
        return self._once(("loaded", example), lambda: self.load(self.saved(example)))

    def load(self, path: Any, **options: Any) -> ExportedModel:
        """Load an export, with the trust that the format needs."""
        return ExportedModel.from_pretrained(
            path, trust_remote_code=self.suite.loading_needs_trust, **options
        )

    def answers(self, example: str) -> dict[str, Answer]:
        """What the saved export answers in a process that never saw the model."""

        def run() -> dict[str, dict[str, Answer]]:
            jobs = {}
            for name in self.suite.examples:
                with suppress(Exception):  # raised again for the tests of that model, below
                    jobs[name] = Job(self.saved(name), self.cases(name), self.suite.loading_needs_trust)
            return run_jobs(jobs, self.folder)

        self.saved(example)
        answers: dict[str, dict[str, Answer]] = self._once("answers", run)
        return answers[example]

    # ── comparing ───────────────────────────────────────────────────────────────────────────────────────────────────

    def assert_same(self, expected: Any, got: Any) -> None:
        """Same class, same fields, same nesting, same tensors within the suite's tolerances."""
        assert type(got) is type(expected), (
            f"returns {type(got).__name__}, the model {type(expected).__name__}"
        )
        self.assert_leaves(dict(structure.flatten_named(expected)), dict(structure.flatten_named(got)))

    def assert_leaves(self, expected: Mapping[str, Any], got: Mapping[str, Any]) -> None:
        """Same tensors, by name, within the suite's tolerances."""
        assert list(got) == list(expected), f"returns {list(got)}, the model {list(expected)}"
        for name, wanted in expected.items():
            if not isinstance(wanted, torch.Tensor):
                assert got[name] == wanted, name
                continue
            assert isinstance(got[name], torch.Tensor), f"{name} is a {type(got[name]).__name__}"
            assert got[name].dtype == wanted.dtype, f"{name} is {got[name].dtype}, the model's {wanted.dtype}"
            dtype = str(wanted.dtype).removeprefix("torch.")
            floating = wanted.is_floating_point() or wanted.is_complex()
            assert not floating or dtype in self.suite.tolerances, f"`tolerances` says nothing about {dtype}"
            atol, rtol = self.suite.tolerances[dtype] if floating else (0.0, 0.0)
            torch.testing.assert_close(got[name], wanted, atol=atol, rtol=rtol, msg=f"{name}: {{}}".format)


class _Failed:
    def __init__(self, error: Exception) -> None:
        self.error = error


def quietly(exported: ExportedModel, kwargs: Mapping[str, Any]) -> Any:
    """Call an export; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return exported(**kwargs)
