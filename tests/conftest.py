"""Fixtures that several folders share: tiny models with random weights, made once.

Nothing here imports a backend: `tests/core` runs where none is installed.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable
from typing import Any

import pytest
import torch

# one order of summation on every machine, and room for the other workers
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_bert() -> torch.nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    return BertModel(config).eval()


@pytest.fixture(scope="session")
def tiny_llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def token_ids() -> Callable[..., dict[str, Any]]:
    """Random ids and an all-ones mask, of any batch and length."""

    def make(batch: int, length: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(batch * 1000 + length)
        return {
            "input_ids": torch.randint(64, (batch, length), generator=generator),
            "attention_mask": torch.ones(batch, length, dtype=torch.int64),
        }

    return make


@pytest.fixture(scope="session")
def static_step() -> Callable[..., dict[str, Any]]:
    """A call of the llama with a cache of a fixed size, with different tokens for each place."""

    def make(cache: Any, past: int, batch: int, query: int) -> dict[str, Any]:
        positions = torch.arange(past, past + query)
        mask = (torch.arange(24) <= positions[:, None]).expand(batch, 1, query, 24)
        ids = (7 * torch.arange(batch)[:, None] + 5 * positions) % 63 + 1
        return {
            "input_ids": ids, "attention_mask": mask, "position_ids": positions.repeat(batch, 1), "cache": cache,
            "use_cache": True,
        }  # fmt: skip

    return make


@pytest.fixture(scope="session")
def static_cache(tiny_llama: Any) -> Callable[[int], Any]:
    from transformers import StaticCache

    def make(batch: int) -> StaticCache:
        cache = StaticCache(config=tiny_llama.config, max_cache_len=24)
        cache.early_initialization(
            batch_size=batch, num_heads=2, head_dim=8, dtype=torch.float32, device=torch.device("cpu")
        )
        return cache

    return make


@pytest.fixture(scope="session")
def check_static_cache(
    tiny_llama: Any, static_cache: Callable[[int], Any], static_step: Callable[..., dict[str, Any]]
) -> Callable[[Any], None]:
    """Check that eager with one cache and an export with another compute the same and leave the same behind, where it lies."""

    def check(exported: Any) -> None:
        for batch in (1, 3):
            theirs, ours = static_cache(batch), static_cache(batch)
            places = [layer.keys.data_ptr() for layer in ours.layers]
            past = 0
            for query in (5, 1, 1):
                with torch.no_grad():
                    expected = tiny_llama(**static_step(theirs, past, batch, query))
                got = exported(**static_step(ours, past, batch, query))
                past += query
                torch.testing.assert_close(got.logits, expected.logits, atol=1e-5, rtol=1e-5)
                for mine, other in zip(ours.layers, theirs.layers, strict=True):
                    torch.testing.assert_close(mine.keys, other.keys, atol=1e-5, rtol=1e-5)
                    torch.testing.assert_close(mine.values, other.values, atol=1e-5, rtol=1e-5)
            assert [layer.keys.data_ptr() for layer in ours.layers] == places

    return check
