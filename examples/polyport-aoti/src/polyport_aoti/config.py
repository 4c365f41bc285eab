"""Options of the aoti backend."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from polyport.config import ExportConfig


@attrs.frozen(kw_only=True)
class AotiConfig(ExportConfig):
    """Options of a compiled package.

    Args:
        max_autotune: Let the compiler try several implementations of each matrix multiplication and keep the fastest:
            minutes in place of seconds.
        inductor_configs: Further options of the compiler, by their names in `torch._inductor.config`.
    """

    export_format: ClassVar[str] = "aoti"

    max_autotune: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    inductor_configs: dict[str, Any] = attrs.field(factory=dict, validator=attrs.validators.instance_of(dict))
