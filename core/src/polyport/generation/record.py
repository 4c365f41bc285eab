"""What an export records about its generation, beside its components."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import cattrs

from polyport.errors import ArtifactError

if TYPE_CHECKING:
    import torch

    from polyport.generation.stages import Plan
from polyport.metadata import CONVERTER


@attrs.frozen(kw_only=True)
class GenerationRecord:
    """How the components of an export make one model.

    Args:
        architecture: Class name of the model, among those of transformers.
        host: Path of the module that is called once per token.
        steps: The components that are calls of the host: `prefill`, where there is one, and `decode`.
        modules: Component -> path of the module that it stands for, for the other components.
        split: Whether a prompt runs through the model's own code, between components, in place of a `prefill`.
        multi_token_decode: Whether `decode` takes any number of tokens.
        static: Whether the caches have a fixed size.
        attn_implementation: The attention that the model's code was told to use: of its config (`""`), and of the configs
            inside it, by their names.
    """

    architecture: str
    host: str = ""
    steps: list[str] = attrs.field(factory=list)
    modules: dict[str, str] = attrs.field(factory=dict)
    split: bool = False
    multi_token_decode: bool = False
    static: bool = False
    attn_implementation: dict[str, str] = attrs.field(factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return attrs.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GenerationRecord:
        """Back from JSON values; fields that a newer version added are left out.

        Raises:
            ArtifactError: A field is missing or of another type.
        """
        known = {field.name for field in attrs.fields(cls)}
        try:
            return CONVERTER.structure({key: value for key, value in values.items() if key in known}, cls)
        except Exception as error:
            raise ArtifactError(
                f"The export's generation record can't be read: {'; '.join(cattrs.transform_error(error))}.",
                stage="load",
            ) from error


def attention_of(config: Any) -> dict[str, str]:
    """The attention that a config and those inside it ask for (see `GenerationRecord.attn_implementation`)."""
    inner = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", {})}
    asked = {
        name: getattr(part, "_attn_implementation", None) for name, part in {"": config, **inner}.items()
    }
    return {name: implementation for name, implementation in asked.items() if implementation}


def uncovered_tensors(model: torch.nn.Module, plan: Plan) -> dict[str, torch.Tensor]:
    """The parameters and buffers that the model's own code needs between components, by name.

    Args:
        model: The model.
        plan: Its components.
    """
    covered = plan.covered()

    def inside(path: str) -> bool:
        return any(path == whole or not whole or path.startswith(f"{whole}.") for whole in covered)

    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        if inside(path):
            continue
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found[f"{path}.{name}".lstrip(".")] = tensor.detach()
    return found
