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
