"""OpenVINO IR as a document: read with care, since it may come from anybody, and written the same every time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from xml.etree import ElementTree
from xml.parsers import expat

#: Elements inside one another: far more than branches and loops in a graph.
_DEEPEST = 200

#: Names that OpenVINO gives by itself.
_COUNTED = re.compile(r"([A-Z][A-Za-z0-9]*)?_?\d*")

#: Names of a tensor are separated by commas that no backslash precedes.
_COMMA = re.compile(r"(?<!\\),")


class IrError(ValueError):
    """A text is no OpenVINO IR, or refers to what it must not."""


def parsed(text: bytes) -> ElementTree.Element:
    """The root of a document.

    Args:
        text: The document, in UTF-8.

    Raises:
        IrError: See `_read`.
    """
    builder = ElementTree.TreeBuilder()
    _read(text, builder.start, builder.end, builder.data)
    return builder.close()


def _read(
    text: bytes,
    start: Callable[[str, dict[str, str]], Any],
    end: Callable[[str], Any],
    characters: Callable[[str], Any] | None = None,
) -> None:
    """Hear what is in a document.

    Args:
        text: The document, in UTF-8.
        start: Hears each element begin, with its attributes.
        end: Hears it end.
        characters: Hears the text between.

    Raises:
        IrError: It is not well-formed, or declares entities, or another encoding.
    """
    reader = expat.ParserCreate("utf-8")
    depth = 0

    def begins(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > _DEEPEST:
            raise IrError(f"has elements inside {_DEEPEST} others")
        start(name, attributes)

    def ends(name: str) -> None:
        nonlocal depth
        depth -= 1
        end(name)

    def refused(*_: object) -> None:
        raise IrError("declares a document type, which no model needs")

    def declared(_: str, encoding: str | None, __: int) -> None:
        if encoding is not None and encoding.lower() not in ("utf-8", "us-ascii"):
            raise IrError(f"is encoded in {encoding}, not in UTF-8")

    reader.StartElementHandler, reader.EndElementHandler = begins, ends
    reader.CharacterDataHandler = characters
    reader.StartDoctypeDeclHandler = reader.EntityDeclHandler = refused
    reader.XmlDeclHandler = declared
    try:
        text.decode("utf-8")
        reader.Parse(text, True)
    except (expat.ExpatError, UnicodeDecodeError) as error:
        raise IrError(f"is no XML: {error}") from error


def constants(root: ElementTree.Element) -> Iterator[ElementTree.Element]:
    """The `data` elements of the weights, those inside branches and loops too."""
    for layer in root.iter("layer"):
        if layer.get("type") == "Const":
            yield from layer.findall("data")


def check_references(text: bytes, size: int) -> None:
    """Refuse weights outside a file. The document is read through, and nothing of it is kept.

    Args:
        text: The document.
        size: Bytes of the file with its weights.

    Raises:
        IrError: A weight lies outside of it, or is no tensor of numbers; or the text is no document (see `_read`).
    """
    path: list[str] = []
    layers: list[dict[str, str]] = []
    holds_graph = False

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal holds_graph
        if not path and name != "net":
            raise IrError("holds no graph")
        holds_graph = holds_graph or (name == "layers" and path == ["net"])
        if name == "layer":
            layers.append(attributes)
        elif name == "data" and path[-1] == "layer" and layers[-1].get("type") == "Const":
            _check_reference(layers[-1].get("name"), attributes, size)
        path.append(name)

    def end(name: str) -> None:
        path.pop()
        if name == "layer":
            layers.pop()

    _read(text, start, end)
    if not holds_graph:
        raise IrError("holds no graph")


def _check_reference(name: str | None, data: Mapping[str, str], size: int) -> None:
    if data.get("element_type") == "string":
        raise IrError(f"holds texts, not numbers, in {name!r}")
    reference = [data.get(key, "") for key in ("offset", "size")]
    if not all(re.fullmatch(r"[0-9]{1,19}", value, re.ASCII) for value in reference):
        raise IrError(f"describes the weight {name!r} wrongly")
    if sum(map(int, reference)) > size:
        raise IrError(f"keeps the weight {name!r} outside its file of weights")


def settle(root: ElementTree.Element, name: str) -> None:
    """Make a document depend on the graph alone: OpenVINO names nodes by counters of the process.

    Args:
        root: Of the document; changed. Names that somebody gave stay: of ports, weights, and operators of the model.
        name: Of the graph.
    """
    root.set("name", name)
    for layers in root.iter("layers"):
        top = layers in root.findall("layers")
        kept = {one for layer in layers if top for one in _COMMA.split(layer.get("output_names", "")) if one}
        for layer in layers:
            kind = layer.get("type", "")
            if not top:
                layer.attrib.pop("output_names", None)
            named = layer.get("name", "")
            if _COUNTED.fullmatch(named):
                layer.set("name", f"{kind}_{layer.get('id')}")
            for port in layer.iterfind("output/port"):
                names = _COMMA.split(port.attrib.pop("names", ""))
                found = [one for one in names if one and top and (kind == "Parameter" or one in kept)]
                if found:
                    port.set("names", ",".join(sorted(found)))


def written(root: ElementTree.Element) -> bytes:
    """The text of a document."""
    text: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return text + b"\n"
