"""What the models of the zoo are made with: the registry, and helpers for weights and inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
import transformers
from transformers import CONFIG_MAPPING

VOCAB = 128
PAD, BOS, EOS = 0, 1, 2
IMG_TOKEN = 100

Inputs = dict[str, torch.Tensor]
Options = dict[str, Any]


@attrs.frozen
class Case:
    """One entry of the zoo.

    Args:
        task: What the model is for.
        modality: The group it is counted in.
        builder: Makes the model.
    """

    task: str
    modality: str
    builder: Callable[[], Built]


@attrs.frozen
class Built:
    """A model with ways to make inputs for it.

    Args:
        model: The model, in eval mode.
        inputs: `(batch, size)` -> forward inputs; size is a length or an image size.
        generate: Inputs of `generate`, where the model has it.
        size: Size of the sample inputs, which have batch 2.
        alt: `(batch, size)` of another shape, None where the model takes no other.
    """

    model: Any
    inputs: Callable[[int, Any], Inputs]
    generate: Inputs | None = None
    size: Any = 12
    alt: tuple[int, Any] | None = (3, 17)


CASES: dict[str, Case] = {}


def case(name: str, task: str, modality: str) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Register the decorated function as the builder of a case."""

    def register(builder: Callable[[], Built]) -> Callable[[], Built]:
        assert name not in CASES, name
        CASES[name] = Case(task, modality, builder)
        return builder

    return register


def built(name: str) -> Built:
    """Build a case from the same seed every time."""
    torch.manual_seed(0)
    return CASES[name].builder()


# ── models ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def config(model_type: str, **options: Any) -> Any:
    """The config of a model type."""
    return CONFIG_MAPPING[model_type](**options)


def make(cls_name: str, cfg: Any) -> Any:
    """A model whose forward keeps no cache, and whose jittered weights hide nothing.

    Fresh models have zero biases, identity scales and initialisers of 1e-10: leaving an addition out of the graph would
    not show. Generation turns the cache on again.
    """
    for sub in _sub_configs(cfg):
        sub._attn_implementation_internal = getattr(sub, "_attn_implementation_internal", None)
    model = getattr(transformers, cls_name)(cfg).eval()
    generator = torch.Generator().manual_seed(1234)
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                param.add_(torch.randn(param.shape, generator=generator).to(param.dtype) * 0.05)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.1)
            elif name.endswith("running_var"):
                buffer.copy_(0.75 + 0.5 * torch.rand(buffer.shape, generator=generator))
    for module in model.modules():
        sub = getattr(module, "config", None)
        if isinstance(sub, transformers.PreTrainedConfig):
            for inner in _sub_configs(sub):
                if getattr(inner, "use_cache", None):
                    inner.use_cache = False
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.use_cache = True
    return model


def _sub_configs(cfg: Any) -> Iterator[Any]:
    yield cfg
    for value in vars(cfg).values():
        if isinstance(value, transformers.PreTrainedConfig):
            yield from _sub_configs(value)


# ── inputs: the same values for the same sizes, on every machine ────────────────────────────────────────────────────


def rng(*key: int) -> torch.Generator:
    """A generator seeded by the numbers of `key`."""
    seed = 17
    for k in key:
        seed = seed * 1009 + k
    return torch.Generator().manual_seed(seed % (2**31))


def ids(batch: int, seq: int, vocab: int = IMG_TOKEN, low: int = 3) -> torch.Tensor:
    """Token ids without special ones."""
    return torch.randint(low, vocab, (batch, seq), generator=rng(batch, seq, vocab))


def right_mask(batch: int, seq: int, step: int = 2) -> torch.Tensor:
    """A mask whose rows end `step` positions before the row above."""
    mask = torch.ones(batch, seq, dtype=torch.long)
    for row in range(1, batch):
        mask[row, seq - step * row :] = 0
    return mask


def padded(batch: int, seq: int, pad: int = PAD, vocab: int = IMG_TOKEN, low: int = 3) -> Inputs:
    """Text padded on the right, so that no query row is masked entirely."""
    mask = right_mask(batch, seq)
    tokens = torch.where(mask.bool(), ids(batch, seq, vocab, low), torch.full((), pad))
    return {"input_ids": tokens, "attention_mask": mask}


def prompt(seq: int = 5) -> Inputs:
    """One prompt for generation."""
    return {"input_ids": ids(1, seq), "attention_mask": torch.ones(1, seq, dtype=torch.long)}


def image(batch: int, height: int, width: int | None = None, channels: int = 3) -> torch.Tensor:
    """Images of noise, square unless told otherwise."""
    width = width or height
    return torch.randn(batch, channels, height, width, generator=rng(batch, height, width))


def with_images(batch: int, seq: int, count: int, token: int = IMG_TOKEN, masked: bool = True) -> Inputs:
    """Text of `seq` tokens with `count` image tokens after the first one, right padded when `masked`."""
    tokens = ids(batch, seq)
    slots = torch.full((batch, count), token)
    tokens = torch.cat([tokens[:, :1], slots, tokens[:, 1:]], dim=1)
    mask = torch.ones_like(tokens)
    if masked:
        for row in range(1, batch):
            mask[row, tokens.shape[1] - 2 * row :] = 0
            tokens[row, tokens.shape[1] - 2 * row :] = PAD
    return {"input_ids": tokens, "attention_mask": mask}


def two_lengths(prompt: Inputs, *, left: bool, extra: int = 2) -> Inputs:
    """Two rows from one: one padded, one with more in it.

    Args:
        prompt: Generate inputs of batch 1.
        left: On which side the padding goes.
        extra: Tokens by which the second row is longer.
    """
    rows = {}
    longer = "input_ids" in prompt
    for name, value in prompt.items():
        if name in ("input_ids", "attention_mask", "mm_token_type_ids", "cross_attention_mask") and longer:
            rows[name] = _two_lengths(name, value, extra, left)
        elif name == "attention_mask":  # of audio: the first row ends earlier
            short = value.clone()
            short[:, -value.shape[1] // 8 :] = 0
            rows[name] = torch.cat([short, value])
        else:
            rows[name] = torch.cat([value, _other_content(name, value)])
    return rows


def _other_content(name: str, value: torch.Tensor) -> torch.Tensor:
    """An image or sound for the second row, of the same size."""
    if not value.is_floating_point() or name == "input_features":
        return value
    if name == "flattened_patches":  # each begins with its row and its column
        return torch.cat([value[..., :2], value[..., 2:].flip(-1)], -1)
    return value.flip(-1)


def _two_lengths(name: str, value: torch.Tensor, extra: int, left: bool) -> torch.Tensor:
    more = {"input_ids": torch.tensor([[7, 9, 11, 13][:extra]]), "attention_mask": torch.ones(1, extra)}
    if name == "cross_attention_mask":
        gap, text = (
            value.new_zeros((1, extra, *value.shape[2:])),
            value.new_zeros((1, extra, *value.shape[2:])),
        )
    else:
        gap = value.new_zeros((1, extra))
        text = more.get(name, torch.zeros(1, extra)).to(value.dtype)
    order = (lambda new: torch.cat([new, value], 1)) if left else (lambda new: torch.cat([value, new], 1))
    return torch.cat([order(gap), order(text)])
