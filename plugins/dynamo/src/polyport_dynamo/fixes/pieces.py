"""Image features that are cut into one piece per image, only to be joined again."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import torch

from polyport.patching import Patch, Target

_NAMESPACE = "polyport_dynamo.fixes.namespace:modeling"


class _Sizes(list):  # type: ignore[type-arg]
    """What `tolist` gives for a tensor of open length: how many sizes there are is not known while tracing."""


class _PackingList(type):
    """Makes a class that acts as `list` for everything but a tensor with an open first axis."""

    def __call__(cls, *args: Any) -> Any:
        if len(args) == 1 and _open(args[0]) and args[0].dim() > 2:
            return [args[0].flatten(0, 1)]
        return builtins.list(*args)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, builtins.list)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, builtins.list)


class PackingList(list, metaclass=_PackingList):  # type: ignore[type-arg]
    """`list`, except that a tensor with an open first axis stays in one piece."""


def _open(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and isinstance(value.shape[0], torch.SymInt)


def _tolist(found: Callable[..., Any]) -> Callable[..., Any]:
    def tolist(self: torch.Tensor) -> Any:
        return _Sizes() if _open(self) and self.dim() == 1 and not self.is_floating_point() else found(self)

    return tolist


def _split(found: Callable[..., Any]) -> Callable[..., Any]:
    def split(tensor: torch.Tensor, split_size_or_sections: Any, dim: int = 0) -> Any:
        if isinstance(split_size_or_sections, _Sizes):
            return (tensor,) if tensor.dim() < 3 or dim != 0 else (tensor.flatten(0, 1),)
        return found(tensor, split_size_or_sections, dim)

    return split


def _split_method(found: Callable[..., Any]) -> Callable[..., Any]:
    def split(self: torch.Tensor, split_size: Any, dim: int = 0) -> Any:
        if isinstance(split_size, _Sizes):
            return (self,) if self.dim() < 3 or dim != 0 else (self.flatten(0, 1),)
        return found(self, split_size, dim)

    return split


def _reproduce() -> None:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaModel

    vision = CLIPVisionConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    text = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model: Any = LlavaModel(LlavaConfig(vision_config=vision, text_config=text, image_token_index=15))
    model.eval()

    class Features(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            found = self.model.get_image_features(
                pixels, vision_feature_layer=-1, vision_feature_select_strategy="default", return_dict=True
            )
            return torch.cat(found.pooler_output, dim=0)

    shapes = {"pixels": {0: torch.export.Dim.AUTO}}
    with torch.no_grad():
        Features()(torch.zeros(2, 3, 16, 16))  # installs the hooks that record hidden states
        program = torch.export.export(Features(), (torch.zeros(2, 3, 16, 16),), dynamic_shapes=shapes)
        program.module()(torch.zeros(3, 3, 16, 16))


def _sees_images(model: Any) -> bool:
    return model is None or any(hasattr(part, "get_image_features") for part in model.modules())


PATCH = Patch(
    id="transformers-per-image-pieces",
    targets=(
        Target(f"{_NAMESPACE}.list", lambda _: PackingList),
        # the tensors of a trace have methods of their own
        Target("torch._subclasses.functional_tensor:FunctionalTensor.tolist", _tolist),
        Target("torch._subclasses.fake_tensor:FakeTensor.tolist", _tolist),
        Target("torch:Tensor.split", _split_method),
        Target("torch:split", _split),
    ),
    reason=(
        "Multimodal models cut the features of all images into a Python list with one entry per image and then "
        "concatenate that list, which bakes the number of images into the graph (Llava, Idefics3, SmolVLM, Qwen-VL...). "
        "While tracing, the list has one entry that holds the features of all images, so that their number stays open; "
        "what the model returns of them is one packed tensor, which a call of the export cuts again."
    ),
    upstream="unreported",
    affects={"transformers": ">=5.20,<6"},
    reproduce=_reproduce,
    applies=_sees_images,
)
