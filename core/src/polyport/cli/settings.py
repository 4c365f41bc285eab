"""From `--to`, `--opset` and `--set` to the configs of an export. No backend is known by name here."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Any

from polyport.errors import ConfigError


def build_configs(
    formats: Sequence[str], *, dynamic: bool, strict: bool, opset: int | None, settings: Sequence[str]
) -> list[Any]:
    """Build one config for each format.

    Args:
        formats: `--to`, in order.
        dynamic: `--dynamic`.
        strict: `--strict`.
        opset: `--opset`, which is the option `opset_version`.
        settings: `--set`: `key=value` goes to every format that has the option, `format.key=value` to one.

    Returns:
        The configs, in the order of `formats`.

    Raises:
        ConfigError: No format was given or one twice, a setting is no `key=value`, or no format has the option.
        BackendNotInstalled: A format's plugin is missing.
    """
    import attrs

    from polyport import discovery
    from polyport.session import Session

    installed = ", ".join(sorted({plugin.name for plugin in discovery.installed()})) or "none"
    if not formats:
        raise ConfigError(f"Say what to export to: --to FORMAT (installed: {installed}).")
    if len(set(formats)) != len(formats):
        raise ConfigError(f"A format is given twice in --to {' --to '.join(formats)}.")
    classes = {name: Session(name).backend.config_class for name in formats}
    fields = {name: [field.name for field in attrs.fields(cls)] for name, cls in classes.items()}
    values: dict[str, dict[str, Any]] = {name: {"dynamic": dynamic, "strict": strict} for name in formats}
    wanted = [_parsed(setting) for setting in settings]
    if opset is not None:
        wanted.append((None, "opset_version", opset))
    for one_format, key, value in wanted:
        if one_format is not None and one_format not in fields:
            raise ConfigError(f"--set {one_format}.{key}=... is for a format that is not exported to.")
        takers = [name for name in formats if one_format in (None, name) and key in fields[name]]
        if not takers:
            raise _unknown(key, {name: fields[name] for name in formats if one_format in (None, name)})
        for name in takers:
            values[name][key] = value
    return [classes[name].from_dict(values[name]) for name in formats]


def _parsed(setting: str) -> tuple[str | None, str, Any]:
    """`[format.]key=value` in its parts; the value is JSON where it can be, else text."""
    name, separator, text = setting.partition("=")
    if not separator or not name:
        raise ConfigError(f"--set {setting} is no key=value pair.")
    one_format, dot, key = name.rpartition(".")
    try:
        value = json.loads(text)
    except ValueError:
        value = {"True": True, "False": False, "None": None}.get(text, text)
    return (one_format if dot else None), key, value


def _unknown(key: str, fields: dict[str, list[str]]) -> ConfigError:
    valid = "; ".join(f"{name}: {', '.join(names)}" for name, names in fields.items())
    near = difflib.get_close_matches(key, sorted({one for names in fields.values() for one in names}), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"There is no option {key!r}.{hint} Valid options: {valid}.")
