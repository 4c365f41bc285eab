"""Keeping the caller's model as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: Buffers are copied up to this many bytes in all; larger ones (a vocabulary-sized table) are only kept by reference.
_COPIED_BYTES = 256 << 20


@contextmanager
def untouched(model: torch.nn.Module, *, evaluate: bool = True) -> Iterator[None]:
    """Give the model back exactly as it was, also after an error or an interrupt.

    A forward pass changes more than it seems to: rope frequencies grow with the longest input seen, masks are cached as
    attributes, and tracing leaves fake tensors wherever a module keeps something for later. So the attributes of every
    module and config are put back, and the values of buffers. Only what a first call does to the weights themselves (RWKV
    rescales them for inference) stays, as it does after any call, with the flag that says so.

    Args:
        model: The caller's model.
        evaluate: Whether to switch it to evaluation mode meanwhile: dropout has no place in an export.
    """
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    # parameters, submodules and hooks live in dicts that are changed in place
    tables = [
        [(value, dict(value)) for value in vars(module).values() if isinstance(value, dict)]
        for module in modules
    ]
    configs = list(_configs(modules))
    options = [dict(vars(config)) for config in configs]
    buffers = _copies(modules)
    weights = [(p, p._version) for p in model.parameters() if not p.is_inference()]
    hooks = torch.is_grad_enabled()
    try:
        if evaluate:
            model.eval()
        yield
    finally:
        torch.set_grad_enabled(hooks)
        for buffer, version, copy in buffers:
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(copy)
        for config, kept in zip(configs, options, strict=True):
            _restore(vars(config), kept)
        rewritten = any(weight._version != version for weight, version in weights)
        for module, kept, owned in zip(modules, attributes, tables, strict=True):
            if rewritten:
                kept.update(_flags(module))
            _restore(vars(module), kept)
            for table, entries in owned:
                _restore(table, entries)


def _restore(found: dict[str, Any], kept: dict[str, Any]) -> None:
    """Make `found` hold what `kept` holds, in place, since others may refer to it."""
    if found.keys() == kept.keys() and all(found[key] is kept[key] for key in kept):
        return
    found.clear()
    found.update(kept)


def _flags(module: torch.nn.Module) -> dict[str, bool]:
    """What a module says of itself by yes and no, beside its mode."""
    return {
        name: value for name, value in vars(module).items() if isinstance(value, bool) and name != "training"
    }


def _configs(modules: list[torch.nn.Module]) -> Iterator[Any]:
    """Every config that a module holds, and those inside them, once each."""
    from transformers import PreTrainedConfig

    seen: set[int] = set()
    stack = [vars(module).get("config") for module in modules]
    stack += [vars(module).get("generation_config") for module in modules]
    while stack:
        config = stack.pop()
        if config is None or id(config) in seen or not hasattr(config, "__dict__"):
            continue
        seen.add(id(config))
        yield config
        stack.extend(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))


def _copies(modules: list[torch.nn.Module]) -> list[tuple[torch.Tensor, int, torch.Tensor]]:
    copies, left, seen = [], _COPIED_BYTES, set()
    for module in modules:
        for buffer in module._buffers.values():
            if buffer is None or id(buffer) in seen or buffer.is_inference():
                continue
            seen.add(id(buffer))
            left -= buffer.nbytes
            if left >= 0:
                copies.append((buffer, buffer._version, buffer.detach().clone()))
    return copies
