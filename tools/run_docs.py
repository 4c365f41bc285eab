"""Run the code of documentation pages, so that a page which no longer works fails the build.

    python tools/run_docs.py PAGE_OR_FOLDER...

Each page is one session in a temporary folder of its own: its ```python blocks run in order in one process and share
their names, its ```bash blocks run between them. A block whose fence says `no-run` (```python no-run) is skipped, and
so is every other language. An error is reported with the page's own line number.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterator
from pathlib import Path

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>python|bash)(?P<flags>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```\s*$",
    re.MULTILINE | re.DOTALL,
)


def pages(arguments: list[str]) -> list[Path]:
    """Return the Markdown files that the arguments name, those of a folder in alphabetical order."""
    found: list[Path] = []
    for argument in map(Path, arguments):
        found += sorted(argument.rglob("*.md")) if argument.is_dir() else [argument]
    return found


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yield (language, code) of each block to run, shifted so that line numbers are those of the page."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        if "no-run" not in match["flags"].split():
            lines = match["code"].splitlines()
            code = "\n".join(line.removeprefix(match["indent"]) for line in lines)
            yield match["language"], "\n" * text.count("\n", 0, match.start("code")) + code


def run(page: Path) -> int:
    """Run one page; return how many blocks ran. Whatever a block raises comes through."""
    # A real module, so that pickling and `inspect` find the classes that a page defines.
    module = types.ModuleType(f"page_{page.stem.replace('-', '_')}")
    sys.modules[module.__name__] = module
    count = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for language, code in blocks(page):
            if language == "bash":
                subprocess.run(["bash", "-euo", "pipefail", "-c", code.strip()], check=True)
            else:
                exec(compile(code, str(page), "exec"), vars(module))
            count += 1
    return count


def main(arguments: list[str]) -> int:
    """Run all pages, also after one failed; return the exit code."""
    found = [page.resolve() for page in pages(arguments)]
    if not found:
        print(f"No Markdown page in: {', '.join(arguments) or '(nothing given)'}")
        return 2
    failed = 0
    for page in found:
        started = time.perf_counter()
        try:
            outcome = f"ok   {page.name}: {run(page)} blocks"
        except Exception:
            traceback.print_exc()
            outcome = f"FAIL {page.name}"
            failed += 1
        print(f"{outcome}, {time.perf_counter() - started:.1f} s", flush=True)
    print(f"{len(found) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
