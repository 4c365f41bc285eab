"""OpenVINO's core, and the names of its devices."""

from __future__ import annotations

import functools
import re

import openvino as ov

from polyport.errors import InputError

#: Devices that hand a model to others.
_VIRTUAL = ("AUTO", "MULTI", "HETERO", "BATCH")


@functools.cache
def core() -> ov.Core:
    """The runtime: one for all models of a process."""
    return ov.Core()


def available() -> tuple[str, ...]:
    """OpenVINO's names of the devices of this machine (`CPU`, `GPU.0`)."""
    return tuple(core().available_devices)


def device_name(name: str | None) -> str:
    """OpenVINO's name of a device.

    Args:
        name: `"cpu"`, `"xpu"`, `"xpu:1"`, a name of OpenVINO's own (`"GPU.1"`, `"AUTO:GPU,CPU"`), or None for the best one.

    Raises:
        InputError: There is no such device here.
    """
    found = available()
    if name is None:
        # AUTO costs 15 microseconds a call, for nothing where there is only one device
        return "CPU" if found == ("CPU",) else "AUTO"
    if not isinstance(name, str):
        raise _missing(name, found)
    wanted = _translated(name)
    if any(device not in found and f"{device}.0" not in found for device in _parts(wanted)):
        raise _missing(name, found)
    return wanted


def physical(name: str) -> tuple[str, ...]:
    """The devices that a name stands for; for `AUTO` alone all that there are."""
    return _parts(name) or available()


def _translated(name: str) -> str:
    """`name` as OpenVINO writes it: torch counts from `xpu:0`, OpenVINO from `GPU.0`."""
    kind, _, index = name.partition(":")
    if kind == "cpu" and index in ("", "0"):
        return "CPU"
    if kind == "xpu":
        return f"GPU.{index}" if index else "GPU"
    return name.upper()


def _parts(name: str) -> tuple[str, ...]:
    kind, _, rest = name.partition(":")
    if kind not in _VIRTUAL:
        return (_single(name),)
    # "-GPU" leaves a device out, "(4)" is how many requests it gets
    listed = [re.sub(r"\(\d+\)$", "", part.strip()) for part in rest.split(",") if part.strip()]
    return tuple(_single(part) for part in listed if not part.startswith("-"))


def _single(name: str) -> str:
    return "GPU" if name == "GPU.0" and "GPU" in available() else name


def _missing(name: object, found: tuple[str, ...]) -> InputError:
    return InputError(
        f"OpenVINO can't run on {name!r} here. Available devices: {', '.join(found)}; AUTO, MULTI and HETERO choose among "
        "them (AUTO:GPU,CPU).",
        stage="run",
        backend="openvino",
    )
