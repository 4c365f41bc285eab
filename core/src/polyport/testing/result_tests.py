"""The export: does it compute what the model computes, and does it say what it is?"""

from __future__ import annotations

import importlib.metadata
import json

import attrs
import pytest
import torch

from polyport import structure
from polyport.capture import tensor_leaves
from polyport.errors import ExportError
from polyport.metadata import ExportMetadata
from polyport.session import Session
from polyport.testing.capabilities import needs
from polyport.testing.models import EXAMPLES
from polyport.testing.suite import Suite
from polyport.testing.workbench import Workbench, quietly


class ResultTests(Suite):
    """Results and metadata."""

    def test_export_computes_what_the_model_computes(self, workbench: Workbench, example: str) -> None:
        """Same class, fields and numbers as the model, at the sample's sizes and at others, padded rows included.

        On failure: the case's name says which sizes. If only larger batches or other lengths fail, your lowering froze an
        axis; if only padded rows do, it lost the mask. If all fail a little, look at your tolerances, then at the runtime's
        own precision: it must compute in the exported one.
        """
        exported = workbench.exported(example)
        for case, kwargs in workbench.cases(example).items():
            try:
                workbench.assert_same(workbench.expected(example, kwargs), quietly(exported, kwargs))
            except Exception as error:
                error.add_note(f"in the case {case!r}")
                raise

    def test_loaded_export_computes_the_same_in_a_fresh_process(
        self, workbench: Workbench, example: str
    ) -> None:
        """Saved here, loaded by a process that never built the model, called there.

        On failure: something the runner needs lives in this process only: a registration, an imported module, a file
        that was not saved. Put it into the program, into the metadata (`backend`), or register it in `polyport_load`.
        """
        answers = workbench.answers(example)
        for case, kwargs in workbench.cases(example).items():
            expected, answer = workbench.expected(example, kwargs), answers[case]
            assert not answer.error, f"{case}: {answer.error}"
            assert answer.cls == type(expected).__qualname__, case
            workbench.assert_leaves(dict(structure.flatten_named(expected)), answer.leaves)

    def test_every_precision_of_the_tolerances(self, workbench: Workbench, precision: str) -> None:
        """A model of each dtype in `tolerances` is exported and computes in that dtype.

        On failure: state tolerances only for dtypes that the runtime computes in, and list them in
        `BackendInfo.runs_dtypes`.
        """
        example = EXAMPLES[self.examples[0]]
        model = example.build().to(getattr(torch, precision))
        if precision == "float32":
            exported = workbench.exported(example.name)
        else:
            exported = workbench.export(model, example)
        assert str(exported.dtype) == f"torch.{precision}"
        kwargs = {
            name: value.to(model.dtype) if value.is_floating_point() else value
            for name, value in workbench.cases(example.name)["sample's sizes"].items()
        }
        with torch.no_grad():
            workbench.assert_same(model(**kwargs), quietly(exported, kwargs))

    def test_unsupported_precision_is_refused(self, workbench: Workbench, session: Session) -> None:
        """A dtype missing from `BackendInfo.runs_dtypes` is refused before any work; an unlisted device is not checked.

        On failure: list in `runs_dtypes` what the runtime has kernels for, by device (`{"cpu": ("float32",)}`).
        """
        allowed = session.backend.runs_dtypes.get("cpu")
        if allowed is None:
            return
        example = EXAMPLES[self.examples[0]]
        assert set(self.tolerances) <= set(allowed), "`tolerances` has dtypes that `runs_dtypes` doesn't list"
        refused = next(
            name for name in ("bfloat16", "float16", "float64", "float8_e5m2") if name not in allowed
        )
        with pytest.raises(ExportError, match=refused):
            workbench.export(example.build().to(getattr(torch, refused)), example)

    def test_verify_passes(self, workbench: Workbench, example: str) -> None:
        """`export.verify(model)` finds nothing.

        On failure: as for the first test of results; the report below names the case and the output.
        """
        atol, rtol = self.tolerances["float32"]
        report = workbench.exported(example).verify(workbench.model(example), atol=atol, rtol=rtol)
        assert report.passed, json.dumps(
            [attrs.asdict(case) for case in report.cases if not case.passed], indent=1
        )

    @needs(supports_dynamic=True)
    def test_dynamic_axes_have_names(self, workbench: Workbench, example: str) -> None:
        """Every axis that varies is in the metadata under its readable name, and its range begins at 1.

        On failure: hand on the names in `traced.metadata`; the graph's own symbols (`s53`) mean nothing to a user.
        """
        metadata = workbench.exported(example)["model"].metadata
        assert metadata.dynamic_axes == EXAMPLES[example].axes
        assert {name: span.min for name, span in metadata.axes.items()} == {
            name: 1 for axes in EXAMPLES[example].axes.values() for name in axes.values()
        }

    @needs(supports_dynamic=False)
    def test_dynamic_is_refused(self, workbench: Workbench) -> None:
        """A backend that only exports fixed sizes says so, in place of exporting something that fails later.

        On failure: raise an `ExportError` in `polyport_lower` (or `ConfigError` in the config) when `config.dynamic` is set.
        """
        example = self.examples[0]
        with pytest.raises(ExportError, match="dynamic"):
            workbench.export(workbench.model(example), EXAMPLES[example], dynamic=True)

    def test_metadata_is_complete(self, workbench: Workbench, session: Session, example: str) -> None:
        """The metadata says what was exported, by what, from what, and what goes in and out.

        On failure: start from `traced.metadata` and `attrs.evolve` it; the message names the field.
        """
        model, metadata = workbench.model(example), workbench.exported(example)["model"].metadata
        assert metadata.architecture == type(model).__name__
        wanted = {"polyport", session.plugin.distribution, "torch", "transformers", *session.backend.packages}
        versions = {name: importlib.metadata.version(name) for name in wanted}
        assert versions.items() <= metadata.packages.items(), "packages"
        assert metadata.export_config["export_format"] == self.format
        assert metadata.export_config["dynamic"] is self.supports_dynamic
        assert metadata.export_dtype == "float32"
        assert metadata.export_device == "cpu"
        kwargs = workbench.cases(example)["sample's sizes"]
        assert set(metadata.kwargs) == set(kwargs), "kwargs"
        assert metadata.in_spec, "in_spec"
        assert metadata.out_spec, "out_spec"
        inputs, outputs = tensor_leaves(kwargs), tensor_leaves(workbench.expected(example, kwargs))
        for what, infos, tensors in (
            ("inputs", metadata.inputs, inputs),
            ("outputs", metadata.outputs, outputs),
        ):
            assert {one.name: one.dtype for one in infos} == {
                name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()
            }, what
            assert {one.name: one.rank for one in infos} == {name: x.dim() for name, x in tensors.items()}, (
                what
            )
        assert [one.name for one in metadata.outputs] == list(outputs), "order of outputs"

    def test_metadata_survives_a_file(self, workbench: Workbench, example: str) -> None:
        """The metadata of a loaded export is the metadata of the export.

        On failure: `backend` holds something that is no JSON value (a tuple comes back as a list).
        """
        metadata = workbench.exported(example)["model"].metadata
        assert ExportMetadata.from_dict(json.loads(json.dumps(metadata.to_dict()))) == metadata
        assert workbench.loaded(example)["model"].metadata == metadata

    def test_description_counts_operators(self, workbench: Workbench, session: Session) -> None:
        """`polyport_describe`, where implemented, returns JSON values, for fresh and loaded exports alike.

        On failure: return plain numbers and text; `"operators"`, `"portable"` and each library in `"delegated"` map names to
        counts.
        """
        example = self.examples[0]
        fresh = session.describe(workbench.exported(example)["model"])
        loaded = session.describe(workbench.loaded(example)["model"])
        assert json.loads(json.dumps(fresh)) == fresh
        assert set(fresh) == set(loaded)
        tables = (fresh.get("operators", {}), fresh.get("portable", {}), *fresh.get("delegated", {}).values())
        assert all(isinstance(count, int) and count > 0 for counts in tables for count in counts.values())
