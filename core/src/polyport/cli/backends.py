"""`polyport backends`: which plugins are installed, and whether they work."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from rich.console import Console
from rich.text import Text

from polyport.cli import options, render
from polyport.cli.frame import Outcome
from polyport.errors import PolyportError


def backends(as_json: options.Json = False, debug: options.Debug = False) -> Outcome:  # noqa: ARG001 - read by the frame
    """Show the installed backends: formats, versions, what they need, and what is wrong with broken ones."""
    from polyport import discovery

    found = [_described(plugin) for plugin in discovery.installed()]
    extensions = [
        {"name": plugin.name, "distribution": plugin.distribution, "version": plugin.version}
        for plugin in discovery.installed(discovery.EXTENSIONS)
    ]
    document = {"backends": found, "extensions": extensions}
    return Outcome(document, lambda console: _show(console, found, extensions))


def _described(plugin: Any) -> dict[str, Any]:
    from polyport.session import Session

    described: dict[str, Any] = {
        "format": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "entry_point": plugin.entry_point.value,
        "error": None,
    }
    try:
        session = Session(plugin.name)
    except PolyportError as error:
        return {**described, "error": str(error)}
    info = session.backend
    packages = {
        name: {"supported": wanted, "installed": _version(name), "tested": info.tested.get(name)}
        for name, wanted in info.packages.items()
    }
    return {
        **described,
        "summary": info.summary,
        "suffix": info.suffix,
        "builds_on": list(info.builds_on),
        "packages": packages,
        "hooks": list(session.hooks()),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _show(console: Console, found: list[dict[str, Any]], extensions: list[dict[str, Any]]) -> None:
    if not found:
        console.print(
            "No backend is installed. Backends are distributions of their own, by convention named polyport-<format>: pip install polyport-<format>",
            markup=False,
        )
    for backend in found:
        heading = Text(backend["format"], style="bold")
        console.print(heading + Text(f"  {backend['distribution']} {backend['version']}"))
        if backend["error"]:
            render.lines(console, [("  broken", Text(backend["error"], style=render.BAD))])
            continue
        packages = [
            f"{name}{package['supported']} (installed {package['installed']})"
            for name, package in backend["packages"].items()
        ]
        hooks = [hook.removeprefix("polyport_") for hook in backend["hooks"]]
        pairs: list[tuple[str, Any]] = [
            ("  what", backend["summary"]),
            ("  builds on", ", ".join(backend["builds_on"]) or None),
            ("  needs", ", ".join(packages) or None),
            ("  hooks", ", ".join(hooks)),
        ]
        render.lines(console, pairs)
    for extension in extensions:
        console.print(
            Text(extension["name"], style="bold")
            + Text(f"  extension of {extension['distribution']} {extension['version']}")
        )
