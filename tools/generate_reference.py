"""Write the reference pages from the code, so that they can't say anything else.

    python tools/generate_reference.py           write docs/reference/{hooks,errors,config,fixes}.md
    python tools/generate_reference.py --check   say which of them are out of date, and fail if one is

Needs the distributions of this repository installed: the core for the first two pages, all backends for the others.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from polyport import ExportConfig, PolyportError, errors, hookspecs
from polyport.patching import GraphFix, Patch
from polyport.session import Session

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"

_NOTE = "<!-- Written by tools/generate_reference.py from the code. Change that, not this. -->"
_ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")
_SECTION = re.compile(r"(Args|Returns|Yields|Raises):")


def main() -> int:
    """Write the pages, or check them."""
    texts = {name: page() for name, page in PAGES_BY_NAME.items()}
    if "--check" in sys.argv[1:]:
        stale = [name for name, text in texts.items() if not _is_current(name, text)]
        for name in stale:
            print(f"docs/reference/{name} is out of date: run python tools/generate_reference.py")
        return bool(stale)
    PAGES.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (PAGES / name).write_text(text, encoding="utf-8")
    return 0


def _is_current(name: str, text: str) -> bool:
    path = PAGES / name
    return path.is_file() and path.read_text(encoding="utf-8") == text


def backends() -> list[Session]:
    """The sessions of this repository's own backends, by name of their folder."""
    return [Session(folder.name) for folder in sorted((ROOT / "plugins").iterdir()) if folder.is_dir()]


# ── docstrings ──────────────────────────────────────────────────────────────────────────────────────────────────────


def sections(documented: object) -> dict[str, str]:
    """The parts of a docstring: `""` holds what comes before `Args:`, `Returns:` and `Raises:`."""
    parts: dict[str, list[str]] = {"": []}
    name = ""
    for line in inspect.cleandoc(getattr(documented, "__doc__", None) or "").splitlines():
        if match := _SECTION.fullmatch(line.strip()):
            name = match[1]
            parts[name] = []
        else:
            parts[name].append(line)
    return {name: textwrap.dedent("\n".join(lines)).strip() for name, lines in parts.items()}


def entries(section: str) -> dict[str, str]:
    """The entries of an `Args:` or `Raises:` section, name -> text."""
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if match := re.fullmatch(r"([\w, ]+): (.*)", line):
            name = match[1]
            found[name] = match[2]
        elif line.strip():
            found[name] += f" {line.strip()}"
    return found


def _prose(text: str) -> str:
    return _ROLE.sub(r"`\1`", text.replace("``", "`"))


def signature(function: Callable[..., Any]) -> str:
    """`name(argument: type, ...) -> type`, as in the source."""
    return f"{function.__name__}{inspect.signature(function)}".replace("'", "")


# ── pages ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def hooks() -> Iterator[str]:
    """Every hook, in pipeline order."""
    yield "# Hooks"
    yield _prose(inspect.cleandoc(hookspecs.__doc__ or "").partition("\n\n")[2])
    for name, spec in vars(hookspecs).items():
        if not name.startswith("polyport_"):
            continue
        parts = sections(spec)
        yield f"## {name}"
        yield f"```python\n{signature(spec)}\n```"
        yield _prose(parts[""])
        for title, of in (("Arguments", "Args"), ("Raises", "Raises")):
            if of in parts:
                lines = [f"- `{entry}`: {_prose(text)}" for entry, text in entries(parts[of]).items()]
                yield f"**{title}**\n\n" + "\n".join(lines)
            if of == "Args" and "Returns" in parts:
                yield f"**Returns** {_prose(' '.join(parts['Returns'].split()))}"


def error_classes() -> Iterator[str]:
    """Every error, below the one it specialises."""
    yield "# Errors"
    yield _prose(inspect.cleandoc(errors.__doc__ or ""))
    yield "\n".join(_tree(PolyportError, 0))


def _tree(cls: type, depth: int) -> Iterator[str]:
    also = [
        base.__name__ for base in cls.__bases__ if base.__module__ == "builtins" and base is not Exception
    ]
    as_well = f" (as a `{also[0]}` too)".replace("a `I", "an `I") if also else ""
    yield f"{'  ' * depth}- `{cls.__name__}`{as_well}: {sections(cls)[''].splitlines()[0]}"
    for other in vars(errors).values():
        if isinstance(other, type) and other.__bases__[0] is cls:
            yield from _tree(other, depth + 1)


def config_classes() -> Iterator[str]:
    """The options of every format, and of each."""
    yield "# Configs"
    yield from _options(ExportConfig, ())
    for session in backends():
        yield from _options(session.backend.config_class, attrs.fields(ExportConfig))


def _options(cls: type, inherited: Any) -> Iterator[str]:
    parts = sections(cls)
    yield f"## {cls.__name__}"
    yield _prose(parts[""])
    texts = entries(parts.get("Args", ""))
    known = {field.name for field in inherited}
    lines = [
        f"- `{field.name}: {field.type} = {_default(field)!r}`: {_prose(texts.get(field.name, ''))}"
        for field in attrs.fields(cls)
        if field.name not in known
    ]
    if lines:
        yield "\n".join(lines)


def _default(field: Any) -> Any:
    made = isinstance(field.default, attrs.Factory)  # type: ignore[arg-type]  # a class, in spite of its stub
    return field.default.factory() if made else field.default


def fixes() -> Iterator[str]:
    """Every patch and graph fix of our backends, with the fault it is for."""
    yield "# Patches and graph fixes"
    yield (
        "What our backends repair in the libraries they build on. Each applies only to the versions that have the fault, "
        "and a test fails once it is no longer needed."
    )
    seen: dict[str, Patch | GraphFix] = {}
    for session in backends():
        for stage in ("trace", "lower", "run"):
            for fix in session.patches(stage, session.backend.config_class()):
                seen.setdefault(fix.id, fix)
    for name, fix in seen.items():
        yield f"## {name}"
        yield fix.reason
        ranges = ", ".join(f"{package} {versions}" for package, versions in fix.affects.items())
        targets = (
            ", ".join(f"`{target.path}`" for target in fix.targets)
            if isinstance(fix, Patch)
            else "the traced graph"
        )
        yield f"- changes: {targets}\n- affected: {ranges}\n- upstream: {fix.upstream}"


def _page(parts: Callable[[], Iterator[str]]) -> Callable[[], str]:
    return lambda: "\n\n".join([_NOTE, *(part for part in parts() if part)]) + "\n"


PAGES_BY_NAME: Mapping[str, Callable[[], str]] = {
    "hooks.md": _page(hooks),
    "errors.md": _page(error_classes),
    "config.md": _page(config_classes),
    "fixes.md": _page(fixes),
}

if __name__ == "__main__":
    sys.exit(main())
