"""Exports that someone damaged or prepared: each must be refused with an `ArtifactError`, and with nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyport.manifest import MANIFEST

#: Changes an export's folder.
Attack = Callable[[Path], None]


def _edited(change: Callable[[dict[str, Any]], Any]) -> Attack:
    """An attack that rewrites the manifest."""

    def attack(folder: Path) -> None:
        path = folder / MANIFEST
        document = json.loads(path.read_text(encoding="utf-8"))
        changed = change(document)
        path.write_text(json.dumps(document if changed is None else changed), encoding="utf-8")

    return attack


def _file(**values: Any) -> Attack:
    return _edited(lambda document: _component(document)["files"][0].update(values))


def _metadata(**values: Any) -> Attack:
    return _edited(lambda document: _component(document)["metadata"].update(values))


def _component(document: dict[str, Any]) -> dict[str, Any]:
    component: dict[str, Any] = document["components"]["model"]
    return component


def _text(text: str) -> Attack:
    def attack(folder: Path) -> None:
        (folder / MANIFEST).write_text(text, encoding="utf-8")

    return attack


def program_file(folder: Path) -> Path:
    """The program file of an export's only component."""
    document = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    name: str = _component(document)["files"][0]["name"]
    return folder / name


def resign(folder: Path) -> None:
    """Make the manifest agree with the program file, as whoever replaced it would."""
    content = program_file(folder).read_bytes()
    _file(size=len(content), sha256=hashlib.sha256(content).hexdigest())(folder)


def _damaged(change: Callable[[bytes], bytes], *, signed: bool) -> Attack:
    def attack(folder: Path) -> None:
        path = program_file(folder)
        path.write_bytes(change(path.read_bytes()))
        if signed:
            resign(folder)

    return attack


def _outside(folder: Path) -> Path:
    """A file beside the export that holds what its program file holds."""
    secret = folder.parent / "outside"
    secret.write_bytes(program_file(folder).read_bytes())
    return secret


def _symbolic_link(folder: Path) -> None:
    path, secret = program_file(folder), _outside(folder)
    path.unlink()
    path.symlink_to(secret)


def _traversal(folder: Path) -> None:
    _file(name=f"../{_outside(folder).name}")(folder)


def _absolute(folder: Path) -> None:
    _file(name=str(_outside(folder).resolve()))(folder)


def _linked_folder(folder: Path) -> None:
    _outside(folder)
    (folder / "linked").symlink_to(folder.parent, target_is_directory=True)
    _file(name="linked/outside")(folder)


def _missing(folder: Path) -> None:
    program_file(folder).unlink()


def _oversized(folder: Path) -> None:
    with (folder / MANIFEST).open("r+b") as stream:
        stream.truncate(200 * 2**20)  # sparse: it takes no room


def _spec(node: Any) -> str:
    text = node if isinstance(node, str) else json.dumps(node)
    return f"[1, {text}]"


_LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}


def _nested(depth: int) -> str:
    """A list in a list in a list..., deeper than `json` itself would write."""
    opened = '{"type": "builtins.list", "context": "null", "children_spec": ['
    return opened * depth + json.dumps(_LEAF) + "]}" * depth


def _of_class(path: str) -> str:
    return _spec({"type": path, "context": '["last_hidden_state"]', "children_spec": [_LEAF]})


_CACHE = "transformers.cache_utils:DynamicCache"

#: What is wrong with the export -> how to make it so.
ATTACKS: Mapping[str, Attack] = {
    # the manifest
    "not JSON": _text("{"),
    "empty manifest": _text(""),
    "no object": _text("[1, 2]"),
    "deeply nested JSON": _text("[" * 100_000),
    "newer schema": _edited(lambda document: {**document, "schema_version": 10**6}),
    "schema of another type": _edited(lambda document: {**document, "schema_version": "1"}),
    "no components": _edited(lambda document: {**document, "components": {}}),
    "format is no text": _edited(lambda document: {**document, "export_format": 5}),
    "components of another type": _edited(lambda document: {**document, "components": [1]}),
    "component is no object": _edited(lambda document: {**document, "components": {"model": 1}}),
    "component with a path for a name": _edited(
        lambda document: {**document, "components": {"../model": _component(document)}}
    ),
    "oversized manifest": _oversized,
    "manifest is missing": lambda folder: (folder / MANIFEST).unlink(),
    # file names
    "path traversal": _traversal,
    "absolute path": _absolute,
    "symbolic link out of the export": _symbolic_link,
    "file in a linked folder": _linked_folder,
    "file name with a zero byte": _file(name="model\0"),
    "file name is no text": _file(name=5),
    "folder for a file": _file(name="."),
    "no files": _edited(lambda document: _component(document).update(files=[])),
    # files
    "file is missing": _missing,
    "wrong size": _file(size=1),
    "wrong hash": _file(sha256="0" * 64),
    "size of another type": _file(size="many"),
    "truncated program": _damaged(lambda content: content[: len(content) // 2], signed=False),
    "changed program": _damaged(lambda content: content[:-1] + bytes([content[-1] ^ 1]), signed=False),
    "truncated program, signed": _damaged(lambda content: content[: len(content) // 2], signed=True),
    "empty program, signed": _damaged(lambda content: b"", signed=True),  # noqa: ARG005
    "garbage for a program, signed": _damaged(lambda content: b"\xff\x00polyport" * 1000, signed=True),  # noqa: ARG005
    # metadata
    "unknown class in out_spec": _metadata(out_spec=_of_class("os.PathLike")),
    "class of transformers that is no output": _metadata(
        out_spec=_of_class("transformers.pipelines.base.Pipeline")
    ),
    "class in a cache": _metadata(
        out_spec=_spec(
            {
                "type": _CACHE,
                "context": json.dumps({"_t": "obj", "p": "subprocess:Popen", "s": {}}),
                "children_spec": [],
            }
        )
    ),
    "out_spec is no JSON": _metadata(out_spec="system"),
    "out_spec of another type": _metadata(out_spec=_spec(5)),
    "deeply nested out_spec": _metadata(out_spec=_spec(_nested(5000))),
    "fewer outputs than out_spec": _metadata(outputs=[]),
    "constant outside the outputs": _metadata(out_constants=[[1000, 1]]),
    "constant at no index": _metadata(out_constants=[["first", 1]]),
    "inputs of another type": _metadata(inputs=5),
    "unknown dtype": _edited(
        lambda document: _component(document)["metadata"]["inputs"][0].update(dtype="load")
    ),
    "shape of another type": _edited(
        lambda document: _component(document)["metadata"]["inputs"][0].update(shape=[[1]])
    ),
    "metadata of another type": _edited(lambda document: _component(document).update(metadata=[])),
}
