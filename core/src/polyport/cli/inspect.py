"""`polyport inspect`: what is in an export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from polyport.cli import options, render
from polyport.cli.exports import locate
from polyport.cli.frame import Outcome
from polyport.errors import BackendConflict, BackendLoadError, BackendNotInstalled, IncompatibleVersion

#: What is wrong with an installation doesn't keep anyone from reading a manifest.
_NO_BACKEND = (BackendConflict, BackendLoadError, BackendNotInstalled, IncompatibleVersion)


def inspect(
    directory: options.Export,
    ops: Annotated[
        int, typer.Option("--ops", metavar="N", help="How many operators to list; 0 for none.", min=0)
    ] = 12,
    subfolder: options.Subfolder = "",
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
    as_json: options.Json = False,
    debug: options.Debug = False,  # noqa: ARG001 - read by the frame
) -> Outcome:
    """Show an export's components: files, inputs, outputs and their axes, operators, versions, patches."""
    from polyport import storage

    folder = locate(directory, subfolder, revision)
    manifest = storage.read_manifest(folder)
    described, problem = (
        ({}, None) if ops == 0 and not as_json else _described(manifest, folder, trust_remote_code)
    )
    components = {}
    for name, record in manifest.components.items():
        metadata = storage.completed(record.metadata).to_dict()
        module = _module(manifest.generation, name)
        files = [{"name": file.name, "size": _size(folder / file.name)} for file in record.files]
        components[name] = {
            "files": files,
            "module": module,
            "metadata": metadata,
            **described.get(name, {}),
        }
    # parts may share files, such as that of the weights
    sizes = {name: _size(folder / name) for name in manifest.file_names()}
    document = {
        "directory": str(folder),
        "format": manifest.export_format,
        "bytes": sum(size for size in sizes.values() if size is not None),
        "components": components,
        "generation": None if manifest.generation is None else manifest.generation.to_dict(),
        "leftovers": _leftovers(manifest, folder),
        "backend_problem": problem,
    }
    return Outcome(document, lambda console: _show(console, document, ops))


def _described(manifest: Any, folder: Path, trust: bool) -> tuple[dict[str, Any], str | None]:
    """What the backend says of each component, or why it can't be asked."""
    from polyport import storage
    from polyport.session import Session

    try:
        session = Session(manifest.export_format)
    except _NO_BACKEND as error:
        return {}, str(error)
    components = storage.load_components(manifest, folder, session, trust=trust)
    return {name: session.describe(component) for name, component in components.items()}, None


def _module(generation: Any, component: str) -> str | None:
    """Path of the module that a component of a generating export stands for; None in an export of one graph."""
    if generation is None:
        return None
    path: str = generation.modules.get(component, generation.host)
    return path


def _leftovers(manifest: Any, folder: Path) -> dict[str, Any] | None:
    """The file of the tensors that no component covers, where there is one."""
    if manifest.leftovers is None:
        return None
    path = folder / manifest.leftovers.name
    return {"name": path.name, "size": _size(path)}


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _show(console: Console, document: Mapping[str, Any], ops: int) -> None:
    console.print(
        Text(document["format"], style="bold")
        + Text(f"  {document['directory']}  {render.size(document['bytes'])}")
    )
    if document["generation"] is not None:
        _show_generation(console, document["generation"], document["leftovers"])
    for name, component in document["components"].items():
        _show_component(console, name, component, ops)
    if document["backend_problem"]:
        console.print(Text(f"Operators are not known: {document['backend_problem']}", style="yellow"))


def _show_generation(
    console: Console, generation: Mapping[str, Any], leftovers: Mapping[str, Any] | None
) -> None:
    many, fixed = generation["multi_token_decode"], generation["static"]
    pairs: list[tuple[str, Any]] = [
        ("generates", generation["architecture"]),
        ("decode step", "any number of tokens" if many else "one token"),
        ("cache", "of a fixed size" if fixed else "grows"),
        ("prompt", "the model's own code between the components" if generation["split"] else None),
        ("beside them", leftovers and f"{leftovers['name']} ({_shown(leftovers)})"),
    ]
    render.lines(console, pairs)


def _shown(file: Mapping[str, Any]) -> str:
    return "missing" if file["size"] is None else render.size(file["size"])


def _show_component(console: Console, name: str, component: Mapping[str, Any], ops: int) -> None:
    metadata = component["metadata"]
    console.print()
    console.print(Text(name, style="bold") + Text(f"  {metadata['architecture'] or ''}"))
    files = ", ".join(f"{file['name']} ({_shown(file)})" for file in component["files"])
    ranges = ", ".join(render.axis_range(axis, limits) for axis, limits in metadata["axes"].items())
    optional = ", ".join(f"{key} ({rule.replace(':', ' ')})" for key, rule in metadata["defaults"].items())
    constants = ", ".join(f"{key}={value}" for key, value in metadata["in_constants"].items())
    packages = ", ".join(f"{package} {version}" for package, version in metadata["packages"].items())
    pairs: list[tuple[str, Any]] = [
        ("files", files),
        ("module", component["module"] or (None if component["module"] is None else "the model itself")),
        ("dtype", metadata["export_dtype"]),
        ("axes", ranges or "none varies"),
        ("optional", optional or None),
        ("constants", constants or None),
        ("made by", packages or None),
        ("patches", ", ".join(metadata["patches"]) or "none"),
    ]
    render.lines(console, pairs)
    rows = [
        (kind if index == 0 else "", info["name"], info["dtype"], render.shape(info))
        for kind in ("inputs", "outputs")
        for index, info in enumerate(metadata[kind])
    ]
    console.print(render.table("", ("", "tensor", "dtype", "axes"), rows))
    if ops:
        render.lines(console, _operators(component, ops))


def _operators(component: Mapping[str, Any], ops: int) -> list[tuple[str, str]]:
    """What the backend says of the operators, and of where they are computed: the most frequent ones of each kind."""
    found = {
        "operators": component.get("operators"),
        **component.get("delegated", {}),
        "not delegated": component.get("portable"),
    }
    return [
        (f"{name} ({sum(counts.values())})", _most_frequent(counts, ops))
        for name, counts in found.items()
        if counts
    ]


def _most_frequent(counts: Mapping[str, int], ops: int) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rest = f", {len(ordered) - ops} more kinds" if len(ordered) > ops else ""
    return ", ".join(f"{operator} {count}" for operator, count in ordered[:ops]) + rest
