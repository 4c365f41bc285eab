"""Numbers and tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

GOOD, BAD = "green", "bold red"


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[str] = ()
) -> Table:
    """A plain table.

    Args:
        title: Its title; empty for none.
        columns: Headers.
        rows: Cells, anything with a `str`; `Text` keeps its style.
        right: Headers of the columns that are aligned to the right.

    Returns:
        The table.
    """
    made = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2),
    )
    for column in columns:
        made.add_column(
            column, justify="right" if column in right else "left", header_style="dim", overflow="fold"
        )
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return made


def lines(console: Console, pairs: Iterable[tuple[str, Any]]) -> None:
    """Print `name  value` lines, one under the other; values that are None are left out."""
    known = [(name, value) for name, value in pairs if value is not None]
    width = max((len(name) for name, _ in known), default=0)
    for name, value in known:
        label = Text.assemble((f"{name:<{width}}  ", "dim"))
        console.print(label.append_text(value if isinstance(value, Text) else Text(str(value))))


def verdict(passed: bool, good: str, bad: str) -> Text:
    """A verdict in its colour; the words alone say it too."""
    return Text(good, style=GOOD) if passed else Text(bad, style=BAD)


def size(count: float) -> str:
    """A number of bytes in decimal units, as disks and downloads are measured (`22.7 MB`)."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def number(value: float | None) -> str:
    """A difference with two digits (`1.2e-06`); a dash for none."""
    return "-" if value is None else f"{value:.1e}" if value else "0"


def shape(info: Mapping[str, Any]) -> str:
    """One tensor's axes, with what each may be (`[batch, sequence, 384]`)."""
    return f"[{', '.join(map(str, info['shape']))}]"


def axis_range(name: str, limits: Mapping[str, Any]) -> str:
    """One axis with the sizes it may take (`batch >= 1`, `1 <= sequence <= 512`)."""
    low, high = limits.get("min"), limits.get("max")
    if high is None:
        return name if low is None else f"{name} >= {low}"
    return f"{low} <= {name} <= {high}"


def verification(report: Mapping[str, Any]) -> Table:
    """The comparison of an export with its model, one row per case and output.

    Args:
        report: `VerificationReport.to_dict()`.

    Returns:
        The table.
    """
    columns = ("case", "sizes", "output", "max abs", "max rel", "atol/rtol", "verdict")
    rows: list[Sequence[Any]] = []
    for case in report["cases"]:
        sizes = " ".join(f"{axis}={count}" for axis, count in case["sizes"].items())
        if case.get("error"):
            rows.append((case["name"], sizes, "-", "-", "-", "-", Text(case["error"], style=BAD)))
        for index, output in enumerate(case["outputs"]):
            head = (case["name"], sizes) if index == 0 else ("", "")
            word = verdict(output["passed"], "ok", output.get("reason") or "differs")
            tolerance = f"{number(output['atol'])}/{number(output['rtol'])}"
            rows.append(
                (*head, output["name"], number(output["max_abs"]), number(output["max_rel"]), tolerance, word)
            )
    return table("", columns, rows, right=("max abs", "max rel"))


def worst(report: Mapping[str, Any]) -> str:
    """A comparison in a few words (`4 cases, largest difference 1.1e-06`)."""
    differences = [output["max_abs"] for case in report["cases"] for output in case["outputs"]]
    known = [value for value in differences if value is not None]
    count = len(report["cases"])
    cases = f"{count} case{'' if count == 1 else 's'}"
    return f"{cases}, largest difference {number(max(known))}" if known else cases
