"""Options of the executorch backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from polyport.config import ExportConfig
from polyport_executorch.recipes import find_recipe

_FLAG = attrs.validators.instance_of(bool)


def _checked_recipe(_config: Any, _attribute: Any, value: str) -> None:
    # here, since this is before any work, whatever is exported and to how many formats
    find_recipe(value)


def _checked_sizes(_config: Any, _attribute: Any, value: Mapping[str, int]) -> None:
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and isinstance(size, int) and not isinstance(size, bool) and size >= 1
        for name, size in value.items()
    ):
        raise ValueError(f"max_sizes must map names of axes to sizes of at least 1, not {value!r}")


@attrs.frozen(kw_only=True)
class ExecutorchConfig(ExportConfig):
    """Options of an ExecuTorch program.

    Args:
        backend: Recipe that the program is lowered with: `"xnnpack"` (CPUs), `"mlx"` (GPUs of Apple Silicon), `"cuda"`, or one
            that a plugin brings. It must be one that can be used here.
        max_sizes: Name of an axis (`"batch"`, `"sequence"`) -> its largest size. ExecuTorch plans memory for the largest sizes; by
            default they follow from the sample and the model's own limits.
        stateful: Keep caches that a call takes and returns inside the program, in mutable buffers as long as the largest cache, so
            that no step passes them. Generation goes on as with others; a second method, `state`, gives out the buffers.
        alloc_graph_input: Whether the plan has memory for the inputs, which a call then copies into; without it the caller's
            memory is read.
        alloc_graph_output: Whether the plan has memory for the outputs; without it the caller gives some.
        alloc_mutable_buffers: Whether the plan has memory for the state inside of the program.
    """

    export_format: ClassVar[str] = "executorch"

    backend: str = attrs.field(
        default="xnnpack", validator=[attrs.validators.instance_of(str), _checked_recipe]
    )
    max_sizes: Mapping[str, int] = attrs.field(factory=dict, validator=_checked_sizes)
    stateful: bool = attrs.field(default=False, validator=_FLAG)
    alloc_graph_input: bool = attrs.field(default=False, validator=_FLAG)
    alloc_graph_output: bool = attrs.field(default=True, validator=_FLAG)
    alloc_mutable_buffers: bool = attrs.field(default=True, validator=_FLAG)
