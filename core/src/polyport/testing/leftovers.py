"""What an export must leave as it was: upstream libraries, the interpreter's settings, the caller's model and inputs."""

from __future__ import annotations

import builtins
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from polyport import structure
from polyport.discovery import installed
from polyport.generation.masks import NAME

#: Libraries that exporters like to patch.
_WATCHED = ("torch", "transformers")

_CALLABLES = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    type,
    staticmethod,
    classmethod,
    property,
)

#: Attributes of a module or class that Python itself replaces.
_PYTHONS = {
    "__annotations__",
    "__annotations_cache__",
    "__abstractmethods__",
    "_abc_impl",
    "__doc__",
    "__warningregistry__",
}


class Upstream:
    """A record of every function, class and method of torch and transformers, by identity, and of torch's modes.

    Take it after a first export: libraries set themselves up lazily, and that is not a leftover. What that first export
    may have left behind is found by where it comes from: nothing of polyport or its plugins belongs there.

    Args:
        before: torch's modes as they were before the first export; those of now when left out.
    """

    def __init__(self, before: Mapping[str, Any] | None = None) -> None:
        self._places = dict(_places())
        self._modes = modes() if before is None else before

    def changes(self) -> list[str]:
        """What differs now; empty if nothing does."""
        now, current = dict(_places()), modes()
        ours = {"polyport", *(plugin.entry_point.module.partition(".")[0] for plugin in installed())}
        return [
            *(
                f"{name} is {value!r}"
                for name, value in now.items()
                if _origin(value) in ours
                and f"[{NAME!r}]" not in name  # registered for good, under our own name
            ),
            *(
                f"{name} is {now.get(name, 'gone')!r} in place of {was!r}"
                for name, was in self._places.items()
                if now.get(name) is not was
            ),
            *(f"{name} was added" for name in now.keys() - self._places.keys() if _shadows(name)),
            *(
                f"{name} is {current[name]!r} in place of {was!r}"
                for name, was in self._modes.items()
                if current[name] != was
            ),
        ]


def _origin(value: Any) -> str:
    """The package that a function or class comes from."""
    if _is(value, types.FunctionType):  # functools.wraps gives a wrapper the module of what it wraps
        return str(value.__globals__.get("__name__", "")).partition(".")[0]
    return str(value.__module__).partition(".")[0] if _is(value, type) else ""


def _shadows(path: str) -> bool:
    """Whether a new module attribute hides a builtin (`int`). Other new ones are mostly lazy imports."""
    return ":" not in path and path.rpartition(".")[2] in vars(builtins)


def _places() -> Iterator[tuple[str, Any]]:
    """Dotted path (`module.name`, `module:Class.name`, `module.registry[key]`) -> what is there."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in _WATCHED or not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if name in _PYTHONS:
                continue
            if _is(value, _CALLABLES):
                yield f"{module_name}.{name}", value
            if _is(value, type) and value.__module__ == module_name:
                yield from _methods(f"{module_name}:{value.__qualname__}", value)
            elif _is_registry(value):
                yield from _entries(f"{module_name}.{name}", value)


def _methods(path: str, cls: type) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(cls).items()):
        if name not in _PYTHONS and _is(value, _CALLABLES):
            yield f"{path}.{name}", value


def _is(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """`isinstance`, without asking the object: upstream has some that warn or import when they are asked anything."""
    return issubclass(type(value), kinds)


def _is_registry(value: Any) -> bool:
    """Attention implementations by name, decompositions by operator...

    Not transformers' lazy dicts, which import every model when they are read.
    """
    return type(value) in (dict, OrderedDict) or (_is(value, MutableMapping) and not _is(value, dict))


def _entries(path: str, registry: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    try:
        items = list(registry.items())
    except Exception:  # noqa: BLE001  lazy mappings whose entries can't be imported here
        return
    for key, value in items:
        if _is(value, types.FunctionType):
            yield f"{path}[{key!r}]", value


def modes() -> dict[str, Any]:
    """Torch's settings and active modes, by how one asks for them."""
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": torch.get_default_device(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled(),
        "torch.is_autocast_enabled('cpu')": torch.is_autocast_enabled("cpu"),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.compiler.is_exporting()": torch.compiler.is_exporting(),
        "the stack of torch function modes": torch._C._len_torch_function_stack(),
        "the stack of torch dispatch modes": torch._C._len_torch_dispatch_stack(),
    }


class Caller:
    """A record of the caller's model and inputs: objects by identity, tensors by value too."""

    def __init__(self, model: Any, inputs: dict[str, Any]) -> None:
        self.model, self.inputs = model, inputs
        self._state, self._values = _state(model, inputs), _values(model, inputs)

    def changes(self) -> list[str]:
        """What differs now; empty if nothing does."""
        state, values = _state(self.model, self.inputs), _values(self.model, self.inputs)
        found = [f"{name} was added" for name in state if name not in self._state]
        found += [
            f"{name} was changed"
            for name, was in self._state.items()
            if not _same(state.get(name, _GONE), was)
        ]
        found += [
            f"the values of {name} were changed"
            for name, was in self._values.items()
            if name in values and not torch.equal(values[name], was)
        ]
        return found


_GONE = object()


def _same(one: Any, other: Any) -> bool:
    plain = (bool, int, float, str, type(None))
    return one is other or (isinstance(one, plain) and type(one) is type(other) and one == other)


def _state(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        where = f"model.{path}" if path else "model"
        for name, value in vars(module).items():
            state[f"{where}.{name}"] = value
            if name in ("_parameters", "_buffers", "_modules") or name.endswith("_hooks"):
                state.update({f"{where}.{name}[{key!r}]": entry for key, entry in value.items()})
    for name, value in vars(model.config).items():
        state[f"model.config.{name}"] = value
    for name, leaf in structure.flatten_named(inputs):
        state[f"inputs.{name}"] = leaf
    return state


def _values(model: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors.update({f"inputs.{name}": leaf for name, leaf in structure.flatten_named(inputs)})
    return {
        name: tensor.detach().clone() for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)
    }
