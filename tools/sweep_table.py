"""The tables of a sweep: `zoo.json` for programs, `zoo.md` for people."""

from __future__ import annotations

import csv
import json
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
    if record["ok"]:
        worst = max((shape.get("max_rel", 0.0) for shape in record["shapes"].values()), default=0.0)
        return f"ok      {record['case']:22} {record['format']:11} {seconds:>8}  max rel {worst:.1e}"
    return f"FAILED  {record['case']:22} {record['format']:11} {seconds:>8}  {record['stage']}: {record['error'][:160]}"


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
        results: One record per case and format.
        modalities: Case -> modality, in the order of the table.
        peer: CSV file with the peer's results.
        known_failures: TOML file with the reasons of failures that are understood.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    order = {name: index for index, name in enumerate(modalities)}
    ordered = sorted(results, key=lambda r: (order.get(r["case"], -1), r["format"]))
    versions: dict[str, str] = {}
    for record in ordered:
        versions |= record["versions"]
    plain = [
        {key: _without_detail(value) for key, value in record.items() if key not in ("detail", "versions")}
        for record in ordered
    ]
    document = {"versions": dict(sorted(versions.items())), "results": plain}
    out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    text = "\n".join(_page(ordered, versions, modalities, _peer(peer), _reasons(known_failures)))
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


def _reasons(path: Path) -> dict[Key, str]:
    if not path.exists():
        return {}
    entries = tomllib.loads(path.read_text()).get("failure", [])
    return {(entry["case"], entry["format"]): entry["reason"] for entry in entries}


# ── the page ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _page(
    results: Sequence[Record],
    versions: Mapping[str, str],
    modalities: Mapping[str, str],
    peer: Mapping[Key, Mapping[str, str]],
    reasons: Mapping[Key, str],
) -> Iterator[str]:
    formats = sorted({record["format"] for record in results})
    found = {(record["case"], record["format"]): record for record in results}
    cases = [case for case in modalities if any((case, name) in found for name in formats)]
    yield "# The zoo: which models export\n"
    yield (
        "Written by `tools/sweep.py`; don't edit. Each case is a tiny model with random weights, exported with "
        "`dynamic=True` from one sample, saved, loaded, and run at the sample's shape, at another shape (batch 3, other "
        "lengths or image sizes) and at batch 1. It is *ok* when every output leaf is there, has eager's shape and dtype, and "
        "differs by less than 1e-3 of the leaf's largest magnitude (integers: not at all). CPU seconds are those of the export: "
        "capture, trace, lower, save. *Peer* is `transformers.exporters` 5.24, measured with the same models "
        "(`tests/zoo/README.md`), at the first two shapes only.\n"
    )
    yield f"Made with {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}.\n"
    yield from _totals(formats, cases, found, modalities, peer)
    yield from _regressions(formats, cases, found, peer, reasons)
    yield from _cases(formats, cases, found, modalities, peer)


def _totals(
    formats: Sequence[str],
    cases: Sequence[str],
    found: Mapping[Key, Record],
    modalities: Mapping[str, str],
    peer: Mapping[Key, Mapping[str, str]],
) -> Iterator[str]:
    yield "## Totals\n"
    yield "| modality | " + " | ".join(f"{name} | peer" for name in formats) + " |"
    yield "|---|" + "---:|---:|" * len(formats)
    groups = list(dict.fromkeys(modalities[case] for case in cases))
    for group in [*groups, None]:
        cells = []
        for name in formats:
            keys = [(c, name) for c in cases if group in (None, modalities[c]) and (c, name) in found]
            ours = Counter(bool(found[key]["ok"]) for key in keys)
            theirs = Counter(peer[key]["result"] == "ok" for key in keys if key in peer)
            cells += [f"{ours[True]} of {ours.total()}", f"{theirs[True]} of {theirs.total()}"]
        yield f"| {group or '**all**'} | {' | '.join(cells)} |"
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
    modalities: Mapping[str, str],
    peer: Mapping[Key, Mapping[str, str]],
) -> Iterator[str]:
    yield "## Cases\n"
    yield "| case | modality | " + " | ".join(f"{name} | CPU s | peer" for name in formats) + " |"
    yield "|---|---|" + "---|---:|---|" * len(formats)
    for case in cases:
        cells = []
        for name in formats:
            record = found.get((case, name))
            if record is None:
                cells += ["", ""]
            else:
                cells += [_verdict(record), f"{total(record):.1f}" if record["ok"] else ""]
            row = peer.get((case, name))
            cells.append("" if row is None else "ok" if _passes(row) else row["where"].replace("_", " "))
        yield f"| {case} | {modalities[case]} | {' | '.join(cells)} |"


def _passes(row: Mapping[str, str] | None) -> bool:
    return row is not None and row["result"] == "ok"


def _verdict(record: Record) -> str:
    if record["ok"]:
        return "ok"
    cause = record["error"].replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
    return f"**failed**, {record['stage']}: {cause[:120]}"
