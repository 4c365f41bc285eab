"""Telling from a model whether a patch concerns it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def uses(*modules: str) -> Callable[[Any], bool]:
    """A predicate: does the model, or one inside it, come from one of these modules?

    Without a model to look at the answer is yes.
    """

    def applies(model: Any) -> bool:
        return model is None or any(type(part).__module__ in modules for part in model.modules())

    return applies


def modules_with(name: str) -> Callable[[Any], bool]:
    """A predicate: is the model, or one inside it, written in a module that knows a helper by this name?

    Without a model to look at the answer is yes.
    """

    def applies(model: Any) -> bool:
        return model is None or any(
            name in vars(sys.modules.get(module, sys))
            for module in {type(part).__module__ for part in model.modules()}
        )

    return applies
