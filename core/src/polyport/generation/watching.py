"""Watching which modules a call of `generate` runs, and with what."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from polyport.capture.prepare import copied


@attrs.define(eq=False)
class Call:
    """One call of a module.

    Args:
        path: Where the module sits in the model (`"model.vision_tower"`, `""` for the model itself).
        module: The module.
        kwargs: What it was called with, by parameter name, copied before the call; None where nobody asked for them.
        children: The calls of other modules inside it, in order.
    """

    path: str
    module: torch.nn.Module
    kwargs: dict[str, Any] | None = None
    children: list[Call] = attrs.field(factory=list)

    def below(self) -> Iterator[Call]:
        """The calls inside it, at any depth."""
        for child in self.children:
            yield child
            yield from child.below()


@contextmanager
def watched(model: torch.nn.Module, wanted: Callable[[str], bool]) -> Iterator[list[Call]]:
    """Watch every call of a module of `model`, for the body of a `with`.

    Args:
        model: The model.
        wanted: Path -> whether the arguments of that module's calls are to be kept.

    Yields:
        The outermost calls, in order; complete when the body has ended.
    """
    outermost: list[Call] = []
    stack: list[Call] = []
    handles: list[Any] = []

    def watch(path: str, module: torch.nn.Module) -> None:
        def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = Call(path, module, by_name(module, args, kwargs) if wanted(path) else None)
            (stack[-1].children if stack else outermost).append(call)
            stack.append(call)

        def leave(*_: Any) -> None:
            while stack and stack.pop().module is not module:
                pass  # calls that an exception has ended

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, always_call=True))

    try:
        for path, module in model.named_modules():
            watch(path, module)
        yield outermost
    finally:
        for handle in handles:
            handle.remove()


def by_name(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by parameter name, copied: the call may write to them."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    own: dict[str, Any] = copied(named)
    return own
