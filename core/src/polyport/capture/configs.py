"""What a config says about the sizes and tokens that mean something to its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def numbers(config: Any) -> set[int]:
    """Every whole number in a config and those inside it: sizes a trace must avoid, lest a comparison be frozen."""
    found: set[int] = set()
    stack: list[Any] = [config.to_dict() if hasattr(config, "to_dict") else {}]
    while stack:
        value = stack.pop()
        if isinstance(value, bool):
            continue
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, Mapping):
            stack.extend(value.values())
        elif isinstance(value, (list, tuple)):
            stack.extend(value)
    return found


def placeholders(config: Any) -> set[int]:
    """Token ids that stand for something: padding, ends, images."""
    found: set[int] = set()
    stack: list[Any] = [config.to_dict() if hasattr(config, "to_dict") else {}]
    while stack:
        for key, value in stack.pop().items():
            if isinstance(value, Mapping):
                stack.append(value)
            elif isinstance(key, str) and key.endswith(("token_id", "token_index")):
                values = value if isinstance(value, (list, tuple)) else [value]
                found.update(item for item in values if isinstance(item, int))
    return found
