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
from polyport.capture import capture, rebuilt, tensor_leaves, untouched
from polyport.capture.configs import placeholders
from polyport.capture.groups import Layout
from polyport.capture.layout import propose
from polyport.capture.resize import resized
from polyport.config import ExportConfig
from polyport.errors import InputError, PolyportError

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
        for name, kwargs in _variations(model, call.sample, metadata.axes):
            try:
                expected = model(**kwargs)
            except Exception:
                if name == "sample":
                    raise
                continue  # sizes the model itself refuses prove nothing about the export
            sizes = _sizes(metadata.dynamic_axes, kwargs)
            traced = {key: value for key, value in kwargs.items() if key not in metadata.in_constants}
            try:
                got = exported(**_copied(traced))
            except PolyportError as error:
                cases.append(CaseReport(name, sizes, (), str(error)))
                continue
            except Exception as error:  # noqa: BLE001
                # whatever a runtime raises is a finding, not a crash of the comparison
                cases.append(CaseReport(name, sizes, (), f"{type(error).__name__}: {error}"))
                continue
            cases.append(CaseReport(name, sizes, tuple(_compare(expected, got, atol, rtol))))
    return VerificationReport(tuple(cases))


def _copied(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The kwargs with containers of their own: a cache that was updated in place is no input for the second call."""
    leaves, spec = structure.flatten(dict(kwargs))
    copied: dict[str, Any] = structure.unflatten(
        [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves], spec
    )
    return copied


def _sizes(axes: Mapping[str, Mapping[int, str]], kwargs: Mapping[str, Any]) -> dict[str, int]:
    leaves = dict(structure.flatten_named(dict(kwargs)))
    found: dict[str, int] = {}
    for name, dims in axes.items():
        for dim, axis in dims.items():
            if isinstance(leaves.get(name), torch.Tensor):
                found.setdefault(axis, int(leaves[name].shape[dim]))
    return found


# ── other inputs, made from the sample ──────────────────────────────────────────────────────────────────────────────


def _variations(
    model: Any, sample: Mapping[str, Any], axes: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The sample, and copies of it at other sizes along the axes the export leaves open."""
    yield "sample", _copied(sample)
    leaves = tensor_leaves(sample)
    special = placeholders(model.config)
    layout = propose(leaves, special).only(set(axes))
    lead = [group for group in layout.groups.values() if group.kind == "lead"]
    plans: list[tuple[str, dict[str, int], int]] = []
    if lead:
        plans.append(("batch x3", {}, 3))
    for group in layout.groups.values():
        high = axes[group.name].max if group.name in axes else None
        if group.kind in ("tokens", "past") and group.size > 0:
            shorter, longer = max(group.size // 2, 1), group.size * 2 + 3
            plans.append((f"{group.name} shorter", {group.name: shorter}, 1))
            plans.append(
                (f"{group.name} longer", {group.name: min(longer, high or longer)}, 2 if lead else 1)
            )
        elif group.kind == "pixels" and group.name == "height":
            square = {g.name: g.size * 2 for g in layout.groups.values() if g.kind == "pixels"}
            plans.append(("image x2", square, 1))
    for name, sizes, copies in plans:
        grown = resized(leaves, layout, sizes, copies, special)
        yield name, rebuilt(sample, grown)
    if lead and leaves[_first(layout, lead[0].name)].shape[0] > 1 and (halved := _first_row(leaves, layout)):
        yield "batch 1", rebuilt(sample, halved)
    mask = leaves.get("attention_mask")
    if mask is not None and mask.dim() == 2 and not mask.is_floating_point() and mask.shape[1] > 2 and lead:
        grown = resized(leaves, layout, {}, 2, special)
        for side in ("left", "right"):
            padded = dict(grown)
            padded["attention_mask"] = _padded(grown["attention_mask"], side)
            yield f"{side} padding", rebuilt(sample, padded)


def _first(layout: Layout, group: str) -> str:
    return next(leaf for leaf, dims in layout.axes.items() if dims.get(0) == (group,))


def _first_row(leaves: Mapping[str, torch.Tensor], layout: Layout) -> dict[str, torch.Tensor] | None:
    """The sample's first row alone; None where rows and leading axes don't divide evenly."""
    batch = layout.groups["batch"].size if "batch" in layout.groups else 0
    if batch < 2:
        return None
    single = {}
    for name, leaf in leaves.items():
        terms = layout.axes.get(name, {}).get(0)
        if terms is None or layout.groups[terms[0]].kind != "lead":
            single[name] = leaf
        elif leaf.shape[0] % batch:
            return None
        else:
            single[name] = leaf[: leaf.shape[0] // batch]
    return single


def _padded(mask: torch.Tensor, side: str) -> torch.Tensor:
    """The mask with a third of the last row hidden on one side."""
    mask, hidden = mask.clone(), max(mask.shape[1] // 3, 1)
    if side == "left":
        mask[-1, :hidden] = 0
    else:
        mask[-1, -hidden:] = 0
    return mask


# ── comparing ───────────────────────────────────────────────────────────────────────────────────────────────────────


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
