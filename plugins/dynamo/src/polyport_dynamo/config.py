"""Options of the dynamo backend."""

from __future__ import annotations

from typing import ClassVar

import attrs

from polyport.config import ExportConfig


@attrs.frozen(kw_only=True)
class DynamoConfig(ExportConfig):
    """Options of a `torch.export` program: those of every format, and no others."""

    export_format: ClassVar[str] = "dynamo"
