"""Models of whole images and videos, and of one shape per image size."""

# ruff: noqa: C408 - as calls of dict, the formatter keeps several options on one line

from __future__ import annotations

from typing import Any

import torch

from .cases import Built, Inputs, Options, case, config, image, make, rng

VIT: Options = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    image_size=32,
    patch_size=8,
)
RESNET: Options = dict(
    embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], layer_type="bottleneck"
)

# name: (model_type, class, task, config, image size, alternative image size)
_VISION: dict[str, tuple[str, str, str, Options, Any, Any]] = {
    "vit": ("vit", "ViTForImageClassification", "image-classification", VIT, 32, 32),
    "deit": ("deit", "DeiTForImageClassificationWithTeacher", "image-classification", VIT, 32, 32),
    "beit": (
        "beit",
        "BeitForImageClassification",
        "image-classification",
        {**VIT, "use_relative_position_bias": True, "use_mean_pooling": True},
        32,
        32,
    ),
    "dinov2": (
        "dinov2",
        "Dinov2ForImageClassification",
        "image-classification",
        {**VIT, "mlp_ratio": 2},
        32,
        48,
    ),
    "swin": (
        "swin",
        "SwinForImageClassification",
        "image-classification",
        dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
        32,
        32,
    ),
    "swinv2": (
        "swinv2",
        "Swinv2ForImageClassification",
        "image-classification",
        dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
        32,
        32,
    ),
    "convnext": (
        "convnext",
        "ConvNextForImageClassification",
        "image-classification",
        dict(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], image_size=64),
        64,
        96,
    ),
    "convnextv2": (
        "convnextv2",
        "ConvNextV2ForImageClassification",
        "image-classification",
        dict(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], image_size=64),
        64,
        96,
    ),
    "resnet": ("resnet", "ResNetForImageClassification", "image-classification", RESNET, 64, 96),
    "regnet": (
        "regnet",
        "RegNetForImageClassification",
        "image-classification",
        dict(embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], groups_width=4),
        64,
        96,
    ),
    "mobilevit": (
        "mobilevit",
        "MobileViTForImageClassification",
        "image-classification",
        dict(
            image_size=64,
            hidden_sizes=[16, 24, 32],
            neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64],
            num_attention_heads=4,
        ),
        64,
        96,
    ),
    "mobilenet_v2": (
        "mobilenet_v2",
        "MobileNetV2ForImageClassification",
        "image-classification",
        dict(image_size=64, depth_multiplier=0.25),
        64,
        96,
    ),
    "segformer": (
        "segformer",
        "SegformerForSemanticSegmentation",
        "semantic-segmentation",
        dict(
            depths=[1, 1, 1, 1],
            hidden_sizes=[8, 16, 24, 32],
            num_attention_heads=[1, 2, 3, 4],
            decoder_hidden_size=16,
            num_labels=5,
        ),
        64,
        96,
    ),
    "hiera": (
        "hiera",
        "HieraForImageClassification",
        "image-classification",
        dict(
            embed_dim=16,
            image_size=[64, 64],
            depths=[1, 1, 2, 1],
            num_heads=[1, 2, 4, 8],
            masked_unit_size=[8, 8],
        ),
        64,
        64,
    ),
    "levit": (
        "levit",
        "LevitForImageClassification",
        "image-classification",
        dict(
            image_size=64,
            hidden_sizes=[16, 24, 32],
            num_attention_heads=[2, 2, 4],
            depths=[1, 1, 1],
            key_dim=[8, 8, 8],
        ),
        64,
        64,
    ),
    "pvt": (
        "pvt",
        "PvtForImageClassification",
        "image-classification",
        dict(
            image_size=64,
            depths=[1, 1, 1, 1],
            hidden_sizes=[8, 16, 24, 32],
            num_attention_heads=[1, 2, 3, 4],
            mlp_ratios=[2, 2, 2, 2],
            num_labels=4,
        ),
        64,
        64,
    ),
    "yolos": (
        "yolos",
        "YolosForObjectDetection",
        "object-detection",
        {**VIT, "image_size": [32, 48], "num_detection_tokens": 5, "num_labels": 4},
        (32, 48),
        (32, 48),
    ),
    "dpt": (
        "dpt",
        "DPTForDepthEstimation",
        "depth-estimation",
        {
            **VIT,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 16, 24, 32],
            "fusion_hidden_size": 16,
            "is_hybrid": False,
        },
        32,
        32,
    ),
}


def _vision(
    name: str,
    model_type: str,
    cls: str,
    task: str,
    kw: Options,
    size: int | tuple[int, int],
    alt: int | tuple[int, int],
) -> None:
    @case(name, task, "vision")
    def builder() -> Built:
        extra = {} if "num_labels" in kw or task == "depth-estimation" else {"num_labels": 4}
        model = make(cls, config(model_type, **kw, **extra))

        def inputs(batch: int, pixels: int) -> Inputs:
            height, width = size if isinstance(size, tuple) else (pixels, pixels)
            return {"pixel_values": image(batch, height, width)}

        return Built(model, inputs, size=size, alt=(3, alt))


for _name, _spec in _VISION.items():
    _vision(_name, *_spec)


@case("vit_mae", "image-pretraining", "vision")
def vit_mae() -> Built:
    model = make(
        "ViTMAEForPreTraining",
        config(
            "vit_mae",
            **VIT,
            decoder_hidden_size=16,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=32,
        ),
    )
    return Built(
        model, lambda b, s: {"pixel_values": image(b, 32), "noise": torch.rand(b, 16, generator=rng(b))}
    )


@case("videomae", "video-classification", "vision")
def videomae() -> Built:
    cfg = config("videomae", **{**VIT, "image_size": 16}, num_frames=4, tubelet_size=2, num_labels=4)
    model = make("VideoMAEForVideoClassification", cfg)
    return Built(model, lambda b, p: {"pixel_values": torch.randn(b, 4, 3, 16, 16, generator=rng(b))})
