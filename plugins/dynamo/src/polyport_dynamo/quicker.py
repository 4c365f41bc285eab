"""Reading a graph, without doing the same again for each of its thousands of values.

torch 2.13 evaluates the type annotations of its schema for every object in an archive, and has sympy parse the text of a
size each time it occurs. Both answers depend on nothing else, so they are kept. Python's collector takes a good part of the
rest, looking for garbage among objects that are all still needed. Together that is half of the time a large graph takes.

The patches' lock also makes readers wait for each other: torch keeps what it is reading in a global, and refuses to read two
archives at a time.
"""

from __future__ import annotations

import dataclasses
import gc
import types
from collections import UserDict
from collections.abc import Callable, Iterator, KeysView
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from polyport.patching import Patch, Target, applied


@contextmanager
def quicker() -> Iterator[None]:
    """Read archives faster for the body of a `with`, one thread at a time."""
    with applied(PATCHES):
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()


def _hints_once(original: Any) -> Any:
    """The module `typing`, whose `get_type_hints` answers each class once."""
    known: dict[Any, Any] = {}

    def get_type_hints(obj: Any, *args: Any, **kwargs: Any) -> Any:
        if obj not in known:
            known[obj] = original.get_type_hints(obj, *args, **kwargs)
        return known[obj]

    return types.SimpleNamespace(**{**vars(original), "get_type_hints": get_type_hints})


def _evaluates_annotations_again() -> None:
    from torch._export.serde import serialize

    evaluated = []

    def note() -> type:
        evaluated.append(1)
        return int

    read: Any = serialize._dict_to_dataclass
    record = dataclasses.make_dataclass("Record", [("value", "note()")], namespace={"note": note})
    for _ in range(2):
        read(record, {"value": 1})
    if len(evaluated) > 1:
        raise RuntimeError("the annotations of a class are evaluated for every object")


def _sizes_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """A reader's `_parse_sym_expr` that parses each text once."""
    known: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    def parse(self: Any, text: Any, hint: Any = None) -> Any:
        if not isinstance(text, str):  # a part of a size that was parsed
            return original(self, text, hint)
        mine, key = known.setdefault(self, {}), (text, type(hint), hint)
        if key not in mine:
            mine[key] = original(self, text, hint)
        return mine[key]

    return parse


def _parses_sizes_again() -> None:
    from torch._export.serde.serialize import GraphModuleDeserializer

    class Functions(UserDict[str, Any]):
        asked = 0

        def keys(self) -> KeysView[str]:
            self.asked += 1
            return super().keys()

    reader: Any = GraphModuleDeserializer()
    reader.sympy_functions, reader.symbol_name_to_symbol = Functions(), {}
    for _ in range(2):
        reader._parse_sym_expr("Integer(3)")
    if reader.sympy_functions.asked > 1:
        raise RuntimeError("the text of a size is parsed each time it occurs")


PATCHES = (
    Patch(
        id="torch-load-annotations",
        targets=(Target("torch._export.serde.serialize:typing", make=_hints_once),),
        reason="Loading the decode step of a 30-layer Llama evaluates annotations 63000 times, a fifth of the time it takes.",
        upstream="unreported",
        affects={"torch": "<2.15"},
        reproduce=_evaluates_annotations_again,
    ),
    Patch(
        id="torch-load-sizes",
        targets=(
            Target("torch._export.serde.serialize:GraphModuleDeserializer._parse_sym_expr", make=_sizes_once),
        ),
        reason="Loading the decode step of a 30-layer Llama parses 500 sizes 7000 times, a third of the time it takes.",
        upstream="unreported",
        affects={"torch": "<2.15"},
        reproduce=_parses_sizes_again,
    ),
)
