"""Several tokens in one step, one step token by token, and the state between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from polyport.errors import InputError
from polyport.generation import bridge, states
from polyport.generation.steps import merged, one_token, token_axis


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# ── tokens ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "shape", "axis"),
    [
        ("input_ids", (2, 5), 1),
        ("decoder_input_ids", (2, 5), 1),
        ("position_ids", (3, 2, 5), 2),
        ("mm_token_type_ids", (2, 5), 1),
        ("inputs_embeds", (2, 5, 8), 1),
        ("attention_mask", (2, 5), None),
        ("attention_mask", (2, 1, 5, 9), 2),
        ("attention_mask.full_attention", (2, 1, 5, 9), 2),
        ("cross_attention_mask", (2, 5, 1, 4), 1),
        ("encoder_outputs.last_hidden_state", (2, 5, 8), None),
        ("logits_to_keep", (5,), None),
        ("use_cache", (), None),
    ],
)
def test_which_axis_counts_tokens(name: str, shape: tuple[int, ...], axis: int | None) -> None:
    assert token_axis(name, torch.zeros(shape)) == axis
    assert token_axis(name, True) is None


def _step(position: int, mask: str) -> dict[str, Any]:
    """The step of the token at a position of a text of two rows, the second padded on the left."""
    length = position + 1
    flat = torch.ones(2, length, dtype=torch.int64)
    flat[1, 0] = 0
    masks: dict[str, Any] = {
        "flat": flat,
        "static": torch.nn.functional.pad(flat, (0, 8 - length)),
        "boolean": flat.bool()[:, None, None],
        "additive": torch.where(flat.bool(), 0.0, torch.finfo(torch.float32).min)[:, None, None],
    }
    masks["by kind"] = {"full_attention": masks["boolean"], "sliding_attention": masks["boolean"].clone()}
    return {
        "input_ids": torch.tensor([[position], [position + 20]]),
        "attention_mask": masks[mask],
        "position_ids": torch.tensor([[position], [position - 1]]),
        "cache": "the cache",
        "use_cache": True,
    }


@pytest.mark.parametrize("mask", ["flat", "static", "boolean", "additive", "by kind"])
def test_two_steps_in_one_and_apart_again(mask: str) -> None:
    first, second = _step(5, mask), _step(6, mask)
    both = merged(first, {**second, "cache": "a later one"}, "cache")
    assert both["input_ids"].tolist() == [[5, 6], [25, 26]]
    assert both["position_ids"].tolist() == [[5, 6], [4, 5]]
    assert both["cache"] == "the cache"
    assert both["use_cache"] is True
    growing = mask == "flat"
    for index, wanted in enumerate((first, second)):
        single = one_token(both, index, 2, "cache", growing=growing)
        assert single.keys() == wanted.keys()
        if mask == "static":
            # where buffers are longer than the text, causality hides what comes later
            single["attention_mask"] = wanted["attention_mask"]
        elif mask != "flat" and index == 0:
            single["attention_mask"] = _trimmed(single["attention_mask"], 6)
        for step in (single, wanted):
            assert step.pop("cache") == "the cache"
        torch.testing.assert_close(single, wanted, rtol=0, atol=0)


def _trimmed(mask: Any, length: int) -> Any:
    """A mask up to a length; what lies behind it must be hidden."""
    if isinstance(mask, dict):
        return {key: _trimmed(value, length) for key, value in mask.items()}
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    assert (mask[..., length:] == hidden).all()
    return mask[..., :length]


def test_positions_of_logits_are_not_asked_for_token_by_token() -> None:
    step = {"input_ids": torch.tensor([[1, 2, 3]]), "logits_to_keep": torch.tensor([2])}
    single = one_token(step, 1, 3, None, growing=True)
    assert single["input_ids"].tolist() == [[2]]
    assert "logits_to_keep" not in single


def test_encoder_results_and_their_mask_stay_whole() -> None:
    step = {
        "decoder_input_ids": torch.tensor([[1, 2]]),
        "attention_mask": torch.ones(1, 2, dtype=torch.int64),
        "decoder_attention_mask": torch.ones(1, 7, dtype=torch.int64),
        "encoder_outputs": (_noise(1, 2, 8),),
    }
    single = one_token(step, 0, 2, None, growing=True)
    assert single["decoder_input_ids"].tolist() == [[1]]
    assert single["attention_mask"].shape == (1, 2)
    assert single["decoder_attention_mask"].shape == (1, 6)
    assert single["encoder_outputs"][0].shape == (1, 2, 8)


# ── caches that keep all tokens ─────────────────────────────────────────────────────────────────────────────────────


def _sliding(window: int = 4) -> Gemma3TextConfig:
    return Gemma3TextConfig(
        num_hidden_layers=2, sliding_window=window, layer_types=["sliding_attention", "full_attention"]
    )


@pytest.mark.parametrize("seen", [0, 2, 3, 9])
def test_a_layer_that_forgot_tokens_gets_zeros_in_front(seen: int) -> None:
    cache, whole = DynamicCache(config=_sliding()), DynamicCache()
    for index in range(2):
        for position in range(seen):
            keys, values = _noise(1, 2, 1, 8) + position, _noise(1, 2, 1, 8) - position
            cache.update(keys, values, index)
            whole.update(keys, values, index)
    states.keep_all_tokens(cache)
    assert [type(layer).__name__ for layer in cache.layers] == ["DynamicLayer"] * 2
    assert cache.get_seq_length() == seen
    if not seen:
        return
    kept = min(seen, 3)
    for ours, theirs in zip(cache.layers, whole.layers, strict=True):
        assert ours.keys.shape == theirs.keys.shape
        torch.testing.assert_close(ours.keys[:, :, -kept:], theirs.keys[:, :, -kept:], rtol=0, atol=0)
        torch.testing.assert_close(ours.values[:, :, -kept:], theirs.values[:, :, -kept:], rtol=0, atol=0)
    assert not cache.layers[0].keys[:, :, : seen - kept].any()
    torch.testing.assert_close(cache.layers[1].keys, whole.layers[1].keys, rtol=0, atol=0)
    cache.update(_noise(1, 2, 1, 8), _noise(1, 2, 1, 8), 0)
    assert cache.layers[0].keys.shape[2] == seen + 1


def test_nothing_to_do_is_nothing_done() -> None:
    cache = DynamicCache()
    cache.update(_noise(1, 2, 3, 8), _noise(1, 2, 3, 8), 0)
    layer, keys = cache.layers[0], cache.layers[0].keys
    states.keep_all_tokens(cache)
    assert cache.layers[0] is layer
    assert layer.keys is keys
    for other in (None, [torch.zeros(1)], "state"):
        states.keep_all_tokens(other)


def test_both_caches_of_an_encoder_decoder() -> None:
    cache = EncoderDecoderCache(DynamicCache(config=_sliding()), DynamicCache(config=_sliding()))
    states.keep_all_tokens(cache)
    layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    assert {type(layer).__name__ for layer in layers} == {"DynamicLayer"}


def test_static_caches() -> None:
    cache = StaticCache(config=_sliding(), max_cache_len=12)
    states.keep_all_tokens(cache)
    assert [type(layer).__name__ for layer in cache.layers] == ["StaticLayer"] * 2
    assert [layer.max_cache_len for layer in cache.layers] == [12, 12]


def test_static_caches_of_windows_alone_need_a_length() -> None:
    config = Gemma3TextConfig(num_hidden_layers=2, sliding_window=4, layer_types=["sliding_attention"] * 2)
    cache = StaticCache(config=config, max_cache_len=12)
    with pytest.raises(InputError, match='Pass cache_implementation="static" in place of a cache'):
        states.keep_all_tokens(cache)
    cache = StaticCache(config=config, max_cache_len=12)
    states.keep_all_tokens(cache, length=12)
    assert [layer.max_cache_len for layer in cache.layers] == [12, 12]


def test_a_filled_static_cache_with_windows_is_refused() -> None:
    cache = StaticCache(config=_sliding(), max_cache_len=12)
    for index in range(2):
        cache.update(_noise(1, 2, 3, 8), _noise(1, 2, 3, 8), index)
    with pytest.raises(InputError, match="sliding window can't be used here"):
        states.keep_all_tokens(cache)


# ── what a cache holds, and what a graph made of it ─────────────────────────────────────────────────────────────────


def _filled(length: int, layers: int = 2, offset: float = 0.0) -> DynamicCache:
    cache = DynamicCache()
    for index in range(layers):
        cache.update(_noise(1, 2, length, 8) + offset, _noise(1, 2, length, 8) - offset, index)
    return cache


def test_tokens_in() -> None:
    assert states.tokens_in(None) == 0
    assert states.tokens_in([torch.zeros(1)]) == 1
    assert states.tokens_in(DynamicCache()) == 0
    assert states.tokens_in(_filled(3)) == 3
    assert states.tokens_in(EncoderDecoderCache(_filled(3), _filled(7))) == 3
    static = StaticCache(config=_sliding(), max_cache_len=12)
    assert states.tokens_in(static) == 0


def test_the_callers_cache_gets_what_the_graph_made() -> None:
    own, made = _filled(3), _filled(4, offset=1.0)
    layers = list(own.layers)
    assert bridge.put(own, made) is own
    assert all(a is b for a, b in zip(own.layers, layers, strict=True))
    assert own.get_seq_length() == 4
    for ours, theirs in zip(own.layers, made.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=0, atol=0)
        torch.testing.assert_close(ours.values, theirs.values, rtol=0, atol=0)


def test_an_empty_cache_gets_layers() -> None:
    own = DynamicCache()
    bridge.put(own, _filled(4))
    assert own.get_seq_length() == 4
    own.update(_noise(1, 2, 1, 8), _noise(1, 2, 1, 8), 0)
    assert own.get_seq_length() == 5


def test_a_cache_that_the_model_wraps() -> None:
    """Some models make a cache for two kinds of attention of a plain one; the caller's stays inside it."""
    own, made = _filled(3), EncoderDecoderCache(_filled(4), _filled(7))
    result = bridge.put(own, made)
    assert isinstance(result, EncoderDecoderCache)
    assert result.self_attention_cache is own
    assert own.get_seq_length() == 4


def test_an_encoder_decoder_cache_knows_that_it_is_filled() -> None:
    own = EncoderDecoderCache(DynamicCache(), DynamicCache())
    made = EncoderDecoderCache(_filled(1), _filled(7))
    assert made.is_updated == {0: True, 1: True}
    bridge.put(own, made)
    assert own.is_updated == {0: True, 1: True}
    assert own.cross_attention_cache.get_seq_length() == 7


def test_emptied() -> None:
    config = LlamaConfig(num_hidden_layers=2)
    cache = StaticCache(config=config, max_cache_len=12)
    for index in range(2):
        cache.update(_noise(1, 2, 3, 8), _noise(1, 2, 3, 8), index)
    empty = states.emptied(cache)
    assert states.tokens_in(empty) == 0
    assert states.tokens_in(cache) == 3
    assert all(not layer.keys.any() for layer in empty.layers)
    assert all(layer.keys.any() for layer in cache.layers)
