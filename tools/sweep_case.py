"""One case of a sweep: build, eager, export, save, load, run at every shape, compare."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sweep_table

from polyport import structure
from polyport.markers import hookimpl

#: Largest difference over the largest magnitude of eager's output that still counts as right.
TOLERANCE = 1e-3

Record = dict[str, Any]


#: Hears a stage begin, and for which format, where it is for one alone.
Announce = Callable[[str, str | None], None]


class Clock:
    """CPU seconds per stage, and the stage that runs now: a set of hook wrappers, given to `polyport.export`."""

    def __init__(self, announce: Announce, name: str | None = None) -> None:
        self.announce, self.name = announce, name
        self.stage = "build"
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, stage: str, key: str = "") -> Iterator[None]:
        """Charge the CPU time of the block to a stage."""
        self.stage, key = stage, key or stage
        self.announce(stage, self.name)
        start = time.process_time()
        try:
            yield
        finally:
            self.seconds[key] = round(self.seconds.get(key, 0.0) + time.process_time() - start, 2)

    @hookimpl(wrapper=True)
    def polyport_capture(self) -> Any:
        """Time the capture."""
        with self.timed("capture"):
            return (yield)

    @hookimpl(wrapper=True)
    def polyport_trace(self) -> Any:
        """Time the trace."""
        with self.timed("trace"):
            return (yield)

    @hookimpl(wrapper=True)
    def polyport_lower(self, config: Any) -> Any:
        """Time the lowering, per format."""
        self.name = config.export_format
        with self.timed("lower", f"lower {self.name}"):
            return (yield)


def examine(zoo: Any, case: str, formats: Sequence[str], announce: Announce) -> Iterator[Record]:
    """Build a case, export it, and compare; `announce` hears each stage begin. Yields one record per format."""
    import torch

    clock = Clock(announce)
    try:
        with clock.timed("build"):
            model, sample, other, _ = zoo.build_all(case)
            inputs = {"sample": sample, "other shape": other, "batch 1": zoo.single(case)}
        with clock.timed("eager"), torch.no_grad():
            wanted = {shape: model(**values) for shape, values in inputs.items() if values is not None}
    except Exception as error:
        yield from (failure(case, name, clock.stage, error, clock.seconds) for name in formats)
        return

    def export(names: Sequence[str]) -> Any:
        import polyport

        configs = [{"export_format": name, "dynamic": True} for name in names]
        return polyport.export(model, sample, configs, plugins=[clock])

    for name, exported, seconds in exports(export, formats, clock):
        if isinstance(exported, Exception):
            yield failure(case, name, clock.stage, exported, seconds)
            continue
        record = {"case": case, "format": name, "patches": list(exported["model"].metadata.patches)}
        run = Clock(announce, name)
        try:
            shapes = _checked(exported, inputs, wanted, run)
        except Exception as error:
            yield {**record, **failure(case, name, run.stage, error, seconds | run.seconds)}
            continue
        wrong = next((shape for shape, result in shapes.items() if not result["ok"]), None)
        cause = {} if wrong is None else {"stage": f"run, {wrong}", "error": shapes[wrong]["error"]}
        cpu = seconds | run.seconds
        yield {**record, "ok": wrong is None, **cause, "shapes": shapes, "cpu_s": cpu}


def exports(
    export: Callable[[Sequence[str]], Any], formats: Sequence[str], clock: Clock
) -> Iterator[tuple[str, Any, dict[str, float]]]:
    """Format, its export or the error, and its CPU seconds. One trace for all of them, unless one of them fails.

    Args:
        export: Formats -> exports by format; the clock listens to it.
        formats: The formats.
        clock: Where the seconds are counted.
    """

    def seconds(name: str) -> dict[str, float]:
        mine = {"capture": "capture", "trace": "trace", f"lower {name}": "lower"}
        return {mine[stage]: value for stage, value in clock.seconds.items() if stage in mine}

    try:
        for name, exported in export(formats).items():
            yield name, exported, seconds(name)
        return
    except Exception as error:
        if len(formats) == 1 or clock.stage in (
            "decompose",
            "capture",
            "trace",
        ):  # what they share has failed for all
            yield from ((name, error, seconds(name)) for name in formats)
            return
    for name in formats:
        clock.name, clock.seconds = name, {}
        try:
            result: Any = export([name])[name]
        except Exception as error:
            result = error
        yield name, result, seconds(name)


def _checked(
    exported: Any, inputs: Mapping[str, Any], wanted: Mapping[str, Any], clock: Clock
) -> dict[str, Record]:
    """Save, load, run at every shape and compare. An error of one shape is its own result."""
    from polyport import ExportedModel

    with tempfile.TemporaryDirectory(prefix="polyport-sweep-") as folder:
        with clock.timed("save"):
            exported.save_pretrained(folder)
        with clock.timed("load"):
            loaded = ExportedModel.from_pretrained(folder)
        results: dict[str, Record] = {}
        for shape, expected in wanted.items():
            with clock.timed("run"):
                try:
                    got = loaded(**inputs[shape])
                except Exception as error:
                    results[shape] = {"ok": False, "error": sweep_table.brief(error), "detail": tail(error)}
                    continue
            results[shape] = compare(expected, got)
    return results


def compare(expected: Any, got: Any) -> Record:
    """Every output leaf: same names, shapes and dtypes, values within the tolerance, integers the same."""
    import torch

    wanted, found = dict(structure.flatten_named(expected)), dict(structure.flatten_named(got))
    if wanted.keys() != found.keys():
        more, less = (
            ", ".join(sorted(found.keys() - wanted.keys())),
            ", ".join(sorted(wanted.keys() - found.keys())),
        )
        return {"ok": False, "error": f"doesn't return {less}" if less else f"returns {more} as well"}
    max_abs = max_rel = 0.0
    problems = []
    for name, a in wanted.items():
        b = found[name]
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            problems += [] if type(a) is type(b) and a == b else [f"{name}: {b!r} instead of {a!r}"]
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            problems.append(f"{name}: {b.dtype}{list(b.shape)} instead of {a.dtype}{list(a.shape)}")
            continue
        if not a.numel() or torch.equal(a, b):
            continue
        kind = torch.complex128 if a.is_complex() else torch.float64
        x, y = a.to(kind), b.to(kind)
        apart = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs()).nan_to_num(nan=torch.inf)
        finite = x.abs()[x.isfinite()]
        scale = float(finite.max()) if finite.numel() else 0.0
        absolute = float(apart.max())
        relative = absolute / scale if scale else absolute
        max_abs, max_rel = max(max_abs, absolute), max(max_rel, relative)
        exact = not (a.is_floating_point() or a.is_complex())
        if exact or not relative < TOLERANCE:
            problems.append(f"{name}: wrong values, off by {relative:.1e} of the largest")
    result = {"ok": not problems, "max_abs": max_abs, "max_rel": max_rel}
    return result | ({"error": problems[0]} if problems else {})


def failure(case: str, name: str, stage: str, error: Exception, seconds: Mapping[str, float]) -> Record:
    """The record of a case that ended with an error."""
    result = {"case": case, "format": name, "ok": False, "stage": stage, "error": sweep_table.brief(error)}
    return {**result, "detail": tail(error), "cpu_s": dict(seconds)}


def tail(error: BaseException, lines: int = 25) -> str:
    """The end of an error's traceback."""
    return "\n".join("".join(traceback.format_exception(error)).splitlines()[-lines:])
