"""One generative case of a sweep: export for generation, save, load, generate, and hold the tokens against eager's."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sweep_table
from sweep_case import Announce, Clock, Record, exports, failure, tail

#: Tokens that every call makes, no fewer.
TOKENS = 20

#: Options that a format needs besides `dynamic`: room for all rows and beams, where it must be known before.
OPTIONS: Mapping[str, Mapping[str, Any]] = {"executorch": {"max_sizes": {"batch": 6}}}

#: How each prompt is continued.
WAYS: Mapping[str, Mapping[str, Any]] = {"greedy": {"num_beams": 1}, "3 beams": {"num_beams": 3}}


def examine(zoo: Any, case: str, formats: Sequence[str], announce: Announce) -> Iterator[Record]:
    """As `sweep_case.examine`, for what `generate` makes. Yields one record per format."""
    clock = Clock(announce)
    try:
        with clock.timed("build"):
            model, _, sample = zoo.build(case)
            prompts = {"batch 1": sample, "padded batch": zoo.padded_prompts(case)}
        with clock.timed("eager"):
            wanted = {key: _attempt(model, prompt, way) for key, prompt, way in _calls(prompts)}
    except Exception as error:
        for name in formats:
            yield _generative(failure(case, name, clock.stage, error, clock.seconds))
        return

    def export(names: Sequence[str]) -> Any:
        import polyport

        clock.stage = "decompose"  # until the first hook is called
        configs = [{"export_format": name, "dynamic": True, **OPTIONS.get(name, {})} for name in names]
        return polyport.export_for_generation(model, sample, configs, plugins=[clock])

    for name, exported, seconds in exports(export, formats, clock):
        if isinstance(exported, Exception):
            yield _generative(failure(case, name, clock.stage, exported, seconds))
            continue
        record: Record = {"case": case, "format": name, "components": list(exported)}
        run = Clock(announce, name)
        try:
            results = _checked(exported, prompts, wanted, run)
        except Exception as error:
            yield _generative({**record, **failure(case, name, run.stage, error, seconds | run.seconds)})
            continue
        wrong = next((key for key, result in results.items() if not result["ok"]), None)
        cause = {} if wrong is None else {"stage": f"run, {wrong}", "error": results[wrong]["error"]}
        cpu = seconds | run.seconds
        yield _generative({**record, "ok": wrong is None, **cause, "shapes": results, "cpu_s": cpu})


def _generative(record: Record) -> Record:
    return {**record, "task": "generate"}


def _calls(prompts: Mapping[str, Any]) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    for shape, prompt in prompts.items():
        for way, options in WAYS.items():
            yield f"{way}, {shape}", prompt, options


def generated(model: Any, prompt: Mapping[str, Any], way: Mapping[str, Any]) -> Any:
    """The tokens that a model, or an export, makes of a prompt."""
    return model.generate(
        **dict(prompt), **way, do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS
    )


def _attempt(model: Any, prompt: Mapping[str, Any], way: Mapping[str, Any]) -> Any:
    try:
        return generated(model, prompt, way)
    except Exception as error:
        return error


def _checked(
    exported: Any, prompts: Mapping[str, Any], wanted: Mapping[str, Any], clock: Clock
) -> dict[str, Record]:
    """Save, load, generate and compare; what eager refuses is left out.

    Raises:
        RuntimeError: Eager refuses everything.
    """
    from polyport import ExportedModel

    with tempfile.TemporaryDirectory(prefix="polyport-sweep-") as folder:
        with clock.timed("save"):
            exported.save_pretrained(folder)
        with clock.timed("load"):
            loaded = ExportedModel.from_pretrained(folder)
        results: dict[str, Record] = {}
        for key, prompt, way in _calls(prompts):
            if isinstance(wanted[key], Exception):
                continue
            with clock.timed("run"):
                try:
                    got = generated(loaded, prompt, way)
                except Exception as error:
                    results[key] = {"ok": False, "error": sweep_table.brief(error), "detail": tail(error)}
                    continue
            results[key] = compare(wanted[key], got)
    if not results:
        raise RuntimeError(f"eager refuses every prompt: {sweep_table.brief(next(iter(wanted.values())))}")
    return results


def compare(expected: Any, got: Any) -> Record:
    """Whether the tokens are the same; where not, which is the first that differs."""
    if expected.shape != got.shape:
        return {"ok": False, "error": f"{list(got.shape)} tokens instead of {list(expected.shape)}"}
    apart = (expected != got).any(0).nonzero()
    if not apart.numel():
        return {"ok": True}
    return {"ok": False, "error": f"another token at {int(apart[0])} of {expected.shape[1]}"}
