"""Proving that an export computes what the model computes.

The model and the export get the same inputs: the sample, and others made from it by changing what the export promises to
leave open (batch, lengths, image sizes, padding). Every output leaf is compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

from polyport import structure
from polyport.capture import capture, untouched
from polyport.config import ExportConfig
from polyport.errors import InputError, PolyportError
from polyport.variations import copied, variations

if TYPE_CHECKING:
    from polyport.artifact import ExportedModel

#: dtype -> (atol, rtol). A value passes when `|export - model| <= atol + rtol * |model|`. float32 leaves room for another
#: order of summation over some thousand terms; the half precisions for a few units in the last place of their mantissas.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1e-4, 1e-4),
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (5e-2, 5e-2),
    torch.complex64: (1e-4, 1e-4),
    torch.complex128: (1e-7, 1e-7),
}


@attrs.frozen
class OutputReport:
    """One output leaf in one case.

    Args:
        name: Its dotted name.
        max_abs: Largest absolute difference; None where shapes differ.
        max_rel: Largest absolute difference over the largest magnitude of the model's output.
        atol, rtol: The tolerance it was held to.
        passed: Whether it holds.
        reason: What is wrong when it doesn't.
    """

    name: str
    max_abs: float | None
    max_rel: float | None
    atol: float
    rtol: float
    passed: bool
    reason: str = ""


@attrs.frozen
class CaseReport:
    """One set of inputs.

    Args:
        name: What is special about it (`sample`, `batch 3`, `left padding`...).
        sizes: Axis name -> size.
        outputs: One report per output leaf.
        error: What went wrong where the export couldn't be run.
    """

    name: str
    sizes: Mapping[str, int]
    outputs: tuple[OutputReport, ...]
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether the export ran and every output is right."""
        return not self.error and bool(self.outputs) and all(output.passed for output in self.outputs)


@attrs.frozen
class VerificationReport:
    """The comparison of an export with its model.

    Args:
        cases: What was compared. Only inputs that the model itself takes are among them.
    """

    cases: tuple[CaseReport, ...]

    @property
    def passed(self) -> bool:
        """The verdict."""
        return bool(self.cases) and all(case.passed for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        cases = [{**attrs.asdict(case), "passed": case.passed} for case in self.cases]
        return {"passed": self.passed, "cases": cases}


def verify(
    exported: ExportedModel,
    model: Any,
    inputs: Mapping[str, Any] | None = None,
    *,
    atol: float | None = None,
    rtol: float | None = None,
) -> VerificationReport:
    """Compare an export with its model: what one graph returns, or what an export for generation answers.

    Args:
        exported: The export.
        model: The model it was made from. It comes back unchanged.
        inputs: Kwargs of forward, or of `generate`, to start from; the sample of the export when left out.
        atol: Absolute tolerance; by default that of each output's dtype (`TOLERANCES`). Outputs that are no floating-point
            numbers must be equal.
        rtol: Relative tolerance, likewise.

    Returns:
        The report.

    Raises:
        InputError: There are no inputs, or the model itself fails on them.
    """
    inputs = exported.sample if inputs is None else inputs
    if inputs is None:
        raise InputError(
            "A loaded export has no sample inputs: pass `inputs` to compare with.", stage="verify"
        )
    if exported.generation is not None:
        from polyport.generation.proof import compare_answers

        return compare_answers(model, exported, inputs, atol=atol, rtol=rtol)
    metadata = exported._only().metadata
    call = capture(
        model, inputs, ExportConfig()
    )  # prepares and checks the inputs, and proves that the model takes them
    cases = []
    with untouched(model), torch.no_grad():
        for name, kwargs in variations(model, call.sample, metadata.axes):
            try:
                expected = model(**kwargs)
            except Exception:
                if name == "sample":
                    raise
                continue  # sizes the model itself refuses prove nothing about the export
            sizes = _sizes(metadata.dynamic_axes, kwargs)
            traced = {key: value for key, value in kwargs.items() if key not in metadata.in_constants}
            try:
                got = exported(**copied(traced))
            except PolyportError as error:
                cases.append(CaseReport(name, sizes, (), str(error)))
                continue
            except Exception as error:  # noqa: BLE001
                # whatever a runtime raises is a finding, not a crash of the comparison
                cases.append(CaseReport(name, sizes, (), f"{type(error).__name__}: {error}"))
                continue
            cases.append(CaseReport(name, sizes, tuple(_compare(expected, got, atol, rtol))))
    return VerificationReport(tuple(cases))


def _sizes(axes: Mapping[str, Mapping[int, str]], kwargs: Mapping[str, Any]) -> dict[str, int]:
    leaves = dict(structure.flatten_named(dict(kwargs)))
    found: dict[str, int] = {}
    for name, dims in axes.items():
        for dim, axis in dims.items():
            if isinstance(leaves.get(name), torch.Tensor):
                found.setdefault(axis, int(leaves[name].shape[dim]))
    return found


def _compare(expected: Any, got: Any, atol: float | None, rtol: float | None) -> Iterator[OutputReport]:
    wanted, found = dict(structure.flatten_named(expected)), dict(structure.flatten_named(got))
    for name in [*wanted, *(name for name in found if name not in wanted)]:
        if not isinstance(wanted.get(name, found.get(name)), torch.Tensor):
            same = wanted.get(name) == found.get(name)
            if not same:
                yield OutputReport(
                    name, None, None, 0.0, 0.0, False, f"{found.get(name)!r} instead of {wanted.get(name)!r}"
                )
            continue
        yield _compare_leaf(name, wanted.get(name), found.get(name), atol, rtol)


def _compare_leaf(name: str, wanted: Any, found: Any, atol: float | None, rtol: float | None) -> OutputReport:
    def wrong(reason: str) -> OutputReport:
        return OutputReport(name, None, None, 0.0, 0.0, False, reason)

    if not isinstance(found, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return wrong("the export doesn't return it" if found is None else "the model doesn't return it")
    if wanted.shape != found.shape:
        return wrong(f"shape {list(found.shape)} instead of {list(wanted.shape)}")
    if wanted.dtype != found.dtype:
        return wrong(f"dtype {found.dtype} instead of {wanted.dtype}")
    default = TOLERANCES.get(wanted.dtype, (0.0, 0.0))
    absolute = default[0] if atol is None or wanted.dtype not in TOLERANCES else atol
    relative = default[1] if rtol is None or wanted.dtype not in TOLERANCES else rtol
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    a, b = wanted.detach().cpu().to(wide), found.detach().cpu().to(wide)
    # where both are not a number, or the same infinity, they agree
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=math.inf)
    max_abs = float(difference.max()) if difference.numel() else 0.0
    magnitude = a.abs()[a.isfinite()]
    scale = float(magnitude.max()) if magnitude.numel() else 0.0
    bound = absolute + relative * torch.where(a.isfinite(), a.abs(), 0.0)
    passed = bool((difference <= bound).all())
    reason = "" if passed else f"{int((difference > bound).sum())} of {difference.numel()} values differ"
    return OutputReport(
        name, max_abs, max_abs / scale if scale else max_abs, absolute, relative, passed, reason
    )
