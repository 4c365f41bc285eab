"""The tables of a sweep: `zoo.json` for programs, `zoo.md` for people."""

from __future__ import annotations

import csv
import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
Key = tuple[str, str]


def brief(error: BaseException) -> str:
    """An error in one line: its class and the first line of its message; what caused it, where that says more."""
    message = str(error).strip()
    return f"{type(error).__name__}: {message.splitlines()[0] if message else ''}"[:300]


def one_line(record: Record) -> str:
    """One result in one line, for the terminal."""
    seconds = f"{total(record):.1f} s"
    if record["ok"] and generative(record):
        return f"ok      {record['case']:22} {record['format']:11} {seconds:>8}  generates: {', '.join(record['shapes'])}"
    if record["ok"]:
        worst = max((shape.get("max_rel", 0.0) for shape in record["shapes"].values()), default=0.0)
        return f"ok      {record['case']:22} {record['format']:11} {seconds:>8}  max rel {worst:.1e}"
    return f"FAILED  {record['case']:22} {record['format']:11} {seconds:>8}  {record['stage']}: {record['error'][:160]}"


def generative(record: Record) -> bool:
    """Whether it is about generating, and not about one forward call."""
    return bool(record.get("task") == "generate")


def total(record: Record) -> float:
    """CPU seconds of the export: from capture to the saved files."""
    stages: Mapping[str, float] = record.get("cpu_s", {})
    return sum(stages.get(stage, 0.0) for stage in ("capture", "trace", "lower", "save"))


def write(
    out: Path, results: Sequence[Record], modalities: Mapping[str, str], peer: Path, known_failures: Path
) -> None:
    """Write `OUT.json` and `OUT.md`.

    Args:
        out: Path of the two files without their suffix.
        results: One record per case, task and format.
        modalities: Case -> modality, in the order of the table.
        peer: CSV file with the peer's results.
        known_failures: TOML file with the reasons of failures that are understood.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    order = {name: index for index, name in enumerate(modalities)}
    ordered = sorted(results, key=lambda r: (generative(r), order.get(r["case"], -1), r["format"]))
    versions: dict[str, str] = {}
    for record in ordered:
        versions |= record["versions"]
    plain = [
        {key: _without_detail(value) for key, value in record.items() if key not in ("detail", "versions")}
        for record in ordered
    ]
    document = {"versions": dict(sorted(versions.items())), "results": plain}
    out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    forward = [record for record in ordered if not generative(record)]
    generated = {(r["case"], r["format"]): r for r in ordered if generative(r)}
    text = "\n".join(_page(forward, generated, versions, modalities, _peer(peer), _reasons(known_failures)))
    out.with_suffix(".md").write_text(text + "\n")


def _without_detail(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_detail(item) for key, item in value.items() if key != "detail"}
    return value


def _peer(path: Path) -> dict[Key, Mapping[str, str]]:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {(row["case"], row["format"]): row for row in csv.DictReader(file)}


def _reasons(path: Path) -> dict[tuple[str, str, str], str]:
    """Case, format and task -> why it fails."""
    if not path.exists():
        return {}
    entries = tomllib.loads(path.read_text()).get("failure", [])
    return {
        (entry["case"], entry["format"], entry.get("task", "forward")): entry["reason"] for entry in entries
    }


# ── the page ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _page(
    results: Sequence[Record],
    generated: Mapping[Key, Record],
    versions: Mapping[str, str],
    modalities: Mapping[str, str],
    peer: Mapping[Key, Mapping[str, str]],
    reasons: Mapping[tuple[str, str, str], str],
) -> Iterator[str]:
    formats = sorted({record["format"] for record in (*results, *generated.values())})
    found = {(record["case"], record["format"]): record for record in results}
    known = found.keys() | generated.keys()
    cases = [case for case in modalities if any((case, name) in known for name in formats)]
    yield "# The zoo: which models export\n"
    yield (
        "Written by `tools/sweep.py`; don't edit. Each case is a tiny model with random weights, exported with "
        "`dynamic=True` from one sample, saved, loaded, and run at the sample's shape, at another shape (batch 3, other "
        "lengths or image sizes) and at batch 1. It is *ok* when every output leaf is there, has eager's shape and dtype, and "
        "differs by less than 1e-3 of the leaf's largest magnitude (integers: not at all). CPU seconds are those of the export: "
        "capture, trace, lower, save. *Peer* is `transformers.exporters` 5.24, measured with the same models "
        "(`tests/zoo/README.md`), at the first two shapes only.\n"
    )
    if generated:
        yield (
            "Those that generate are also exported for generation, from one prompt, saved and loaded. *Generates* is *ok* when "
            "20 tokens are eager's, to the last one: greedily and with 3 beams, for one prompt and for a padded batch of two "
            "(without what eager itself refuses).\n"
        )
    yield f"Made with {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}.\n"
    yield from _totals(formats, cases, found, generated, modalities, peer)
    forward = {(case, name): reason for (case, name, task), reason in reasons.items() if task == "forward"}
    yield from _regressions(formats, cases, found, peer, forward)
    yield from _failures_to_generate(formats, cases, generated, reasons)
    yield from _cases(formats, cases, found, generated, modalities, peer)


def _totals(
    formats: Sequence[str],
    cases: Sequence[str],
    found: Mapping[Key, Record],
    generated: Mapping[Key, Record],
    modalities: Mapping[str, str],
    peer: Mapping[Key, Mapping[str, str]],
) -> Iterator[str]:
    more = " | generates" if generated else ""
    yield "## Totals\n"
    yield "| modality | " + " | ".join(f"{name} | peer{more}" for name in formats) + " |"
    yield "|---|" + ("---:|---:|" + "---:|" * bool(generated)) * len(formats)
    groups = list(dict.fromkeys(modalities[case] for case in cases))
    for group in [*groups, None]:
        cells = []
        for name in formats:
            keys = [(c, name) for c in cases if group in (None, modalities[c])]
            cells.append(_count(bool(found[key]["ok"]) for key in keys if key in found))
            cells.append(_count(_passes(peer[key]) for key in keys if key in found and key in peer))
            if generated:
                cells.append(_count(bool(generated[key]["ok"]) for key in keys if key in generated))
        yield f"| {group or '**all**'} | {' | '.join(cells)} |"
    yield ""


def _count(passed: Iterable[bool]) -> str:
    counted = Counter(passed)
    return f"{counted[True]} of {counted.total()}" if counted else ""


def _failures_to_generate(
    formats: Sequence[str],
    cases: Sequence[str],
    generated: Mapping[Key, Record],
    reasons: Mapping[tuple[str, str, str], str],
) -> Iterator[str]:
    if not generated:
        return
    failed = [
        (case, name)
        for case in cases
        for name in formats
        if (case, name) in generated and not generated[case, name]["ok"]
    ]
    yield "## Fails to generate\n"
    if not failed:
        yield "None."
    for case, name in failed:
        yield f"- `{case}`, {name}: {reasons.get((case, name, 'generate'), 'not looked into yet')}"
    yield ""


def _regressions(
    formats: Sequence[str],
    cases: Sequence[str],
    found: Mapping[Key, Record],
    peer: Mapping[Key, Mapping[str, str]],
    reasons: Mapping[Key, str],
) -> Iterator[str]:
    keys = [(case, name) for case in cases for name in formats if (case, name) in found]
    worse = [key for key in keys if not found[key]["ok"] and _passes(peer.get(key))]
    better = [key for key in keys if found[key]["ok"] and key in peer and not _passes(peer[key])]
    yield "## Passes with the peer, fails here\n"
    if not worse:
        yield "None."
    for case, name in worse:
        yield f"- `{case}`, {name}: {reasons.get((case, name), 'not looked into yet')}"
    both = [key for key in keys if not found[key]["ok"] and key not in worse and key in reasons]
    if both:
        yield "\n## Other failures that are understood\n"
        yield from (f"- `{case}`, {name}: {reasons[case, name]}" for case, name in both)
    yield "\n## Fails with the peer, passes here\n"
    for name in formats:
        names = [f"`{case}`" for case, other in better if other == name]
        if names:
            yield f"- {name} ({len(names)}): {', '.join(names)}"
    if not better:
        yield "None."
    yield ""


def _cases(
    formats: Sequence[str],
    cases: Sequence[str],
    found: Mapping[Key, Record],
    generated: Mapping[Key, Record],
    modalities: Mapping[str, str],
    peer: Mapping[Key, Mapping[str, str]],
) -> Iterator[str]:
    more = " | generates | CPU s" if generated else ""
    yield "## Cases\n"
    yield "| case | modality | " + " | ".join(f"{name} | CPU s | peer{more}" for name in formats) + " |"
    yield "|---|---|" + ("---|---:|---|" + "---|---:|" * bool(generated)) * len(formats)
    for case in cases:
        cells = []
        for name in formats:
            cells += _cells(found.get((case, name)))
            row = peer.get((case, name))
            cells.append("" if row is None else "ok" if _passes(row) else row["where"].replace("_", " "))
            if generated:
                cells += _cells(generated.get((case, name)))
        yield f"| {case} | {modalities[case]} | {' | '.join(cells)} |"


def _cells(record: Record | None) -> list[str]:
    if record is None:
        return ["", ""]
    return [_verdict(record), f"{total(record):.1f}" if record["ok"] else ""]


def _passes(row: Mapping[str, str] | None) -> bool:
    return row is not None and row["result"] == "ok"


def _verdict(record: Record) -> str:
    if record["ok"]:
        return "ok"
    cause = record["error"].replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
    return f"**failed**, {record['stage']}: {cause[:120]}"
