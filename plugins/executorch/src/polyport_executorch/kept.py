"""What an export records of the caches that its program keeps."""

from __future__ import annotations

from polyport.errors import ConfigError
from polyport.metadata import ExportMetadata, TensorInfo
from polyport_dynamo.lowering.caches import kept_leaves
from polyport_executorch.bounds import total

#: Key of `ExportMetadata.backend`: the leaves that are kept.
KEPT = "kept"


def kept_leaves_of(metadata: ExportMetadata) -> tuple[str, ...]:
    """The leaves that a program keeps, as its record says.

    Raises:
        ArtifactError: The record is damaged.
    """
    return kept_leaves(metadata, KEPT)


def table_of(info: TensorInfo, metadata: ExportMetadata) -> list[int]:
    """The sizes that a program has room for.

    Args:
        info: A cache as an output.
        metadata: The record of the graph, in which all axes are bounded.

    Raises:
        ConfigError: A size has no limit.
    """
    largest = [size if isinstance(size, int) else total(metadata, size) for size in info.shape]
    found = [size for size in largest if size is not None]
    if len(found) != len(largest):
        raise ConfigError(
            f"stateful=True needs a largest size of every axis of {info.name!r}, which is {info.shape}.",
            backend="executorch",
        )
    return found
