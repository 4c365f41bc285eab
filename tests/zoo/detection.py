"""Detection, segmentation, depth and masks: backbones with heads of their own."""

# ruff: noqa: C408 - as calls of dict, the formatter keeps several options on one line

from __future__ import annotations

import torch

from .cases import (
    Built,
    Inputs,
    case,
    config,
    image,
    make,
    rng,
)
from .vision import RESNET


@case("detr", "object-detection", "vision")
def detr() -> Built:
    backbone = config("resnet", **RESNET, out_features=["stage4"])
    cfg = config(
        "detr",
        backbone_config=backbone,
        use_timm_backbone=False,
        num_queries=6,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_labels=4,
    )
    model = make("DetrForObjectDetection", cfg)

    def inputs(batch: int, pixels: int) -> Inputs:
        mask = torch.ones(batch, pixels, pixels, dtype=torch.long)
        mask[1:, :, pixels - 32 :] = 0
        return {"pixel_values": image(batch, pixels), "pixel_mask": mask}

    return Built(model, inputs, size=96, alt=(3, 128))


@case("rt_detr", "object-detection", "vision")
def rt_detr() -> Built:
    backbone = config(
        "rt_detr_resnet",
        embedding_size=8,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        out_features=["stage2", "stage3", "stage4"],
    )
    cfg = config(
        "rt_detr",
        backbone_config=backbone,
        use_timm_backbone=False,
        encoder_hidden_dim=32,
        encoder_in_channels=[16, 24, 32],
        encoder_ffn_dim=32,
        encoder_attention_heads=4,
        d_model=32,
        num_queries=8,
        decoder_in_channels=[32, 32, 32],
        decoder_ffn_dim=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        num_denoising=0,
        num_labels=4,
        hidden_expansion=1.0,
    )
    model = make("RTDetrForObjectDetection", cfg)
    return Built(model, lambda b, p: {"pixel_values": image(b, p)}, size=64, alt=(3, 96))


@case("depth_anything", "depth-estimation", "vision")
def depth_anything() -> Built:
    backbone = config(
        "dinov2",
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        mlp_ratio=2,
        image_size=56,
        patch_size=14,
        out_features=["stage1", "stage2", "stage3", "stage4"],
        reshape_hidden_states=False,
    )
    cfg = config(
        "depth_anything",
        backbone_config=backbone,
        reassemble_hidden_size=32,
        neck_hidden_sizes=[8, 16, 24, 32],
        fusion_hidden_size=16,
        head_hidden_size=8,
    )
    model = make("DepthAnythingForDepthEstimation", cfg)
    return Built(model, lambda b, p: {"pixel_values": image(b, p)}, size=56, alt=(3, 84))


@case("mask2former", "instance-segmentation", "vision")
def mask2former() -> Built:
    backbone = config(
        "swin",
        image_size=64,
        patch_size=2,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 2, 4, 8],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    cfg = config(
        "mask2former",
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        encoder_layers=1,
        decoder_layers=3,
        num_attention_heads=2,
        dim_feedforward=32,
        num_queries=5,
        num_labels=4,
    )
    model = make("Mask2FormerForUniversalSegmentation", cfg)
    return Built(model, lambda b, p: {"pixel_values": image(b, p)}, size=64, alt=(3, 64))


@case("sam", "mask-generation", "vision")
def sam() -> Built:
    cfg = config(
        "sam",
        vision_config=dict(
            hidden_size=32,
            output_channels=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=64,
            patch_size=8,
            window_size=4,
            global_attn_indexes=[1],
            num_pos_feats=16,
            mlp_dim=64,
        ),
        prompt_encoder_config=dict(hidden_size=32, image_size=64, patch_size=8, mask_input_channels=8),
        mask_decoder_config=dict(hidden_size=32, mlp_dim=64, num_attention_heads=4, iou_head_hidden_dim=32),
    )
    model = make("SamModel", cfg)

    def inputs(batch: int, points: int) -> Inputs:
        gen = rng(batch, points)
        return {
            "pixel_values": image(batch, 64),
            "input_points": 64 * torch.rand(batch, 1, points, 2, generator=gen),
            "input_labels": torch.randint(0, 2, (batch, 1, points), generator=gen),
        }

    return Built(model, inputs, size=3, alt=(3, 5))
