"""All loaded modeling modules of transformers as one namespace.

Modeling code refers to builtins and to helpers by plain names, imported into every module. A patch of the module that
defines a helper would come too late for them, so patches go through this namespace: setting an attribute of it sets the name
in every loaded modeling module, and deleting it puts back what was there.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_ABSENT = object()


class ModelingModules:
    """See the module's docstring. Reading an attribute gives the builtin or what the first module calls by that name."""

    def __init__(self) -> None:
        self.__dict__["_replaced"] = {}

    def __getattr__(self, name: str) -> Any:
        if hasattr(builtins, name):
            return getattr(builtins, name)
        for module in _loaded():
            if name in vars(module):
                return vars(module)[name]
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        builtin = hasattr(builtins, name)
        kept = []
        for module in _loaded():
            found = vars(module).get(name, _ABSENT)
            if found is not _ABSENT or builtin:
                kept.append((module, found))
                setattr(module, name, value)
        self._replaced[name] = kept
        vars(self)[name] = value

    def __delattr__(self, name: str) -> None:
        del vars(self)[name]
        for module, found in reversed(self._replaced.pop(name)):
            if found is _ABSENT:
                delattr(module, name)
            else:
                setattr(module, name, found)


def _loaded() -> Iterator[ModuleType]:
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if id(module) in seen:  # some are known by two names
            continue
        seen.add(id(module))
        # code that runs inside a forward: models, and the shared layers they call
        if name.startswith("transformers.models.") and name.rpartition(".")[2].startswith("modeling_"):
            yield module


#: The one namespace that patches refer to, as `polyport_dynamo.fixes.namespace:modeling.<name>`.
modeling = ModelingModules()
