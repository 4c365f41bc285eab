"""Models that carry a state through the sequence: prompts of other lengths than the sample's, shorter and much longer."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from polyport import DynamoExporter
from polyport_dynamo.fixes.delta import CHUNK, delta_rule

sys.path[:0] = [str(Path(__file__).parents[1])]

import zoo  # noqa: E402

RULES = {
    "torch_chunk_gated_delta_rule": ("qwen3_next", ()),
    "chunk_kimi_delta_attention": ("kimi_linear", (8,)),
}


def _original(name: str) -> Any:
    module = RULES[name][0]
    return getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("length", [1, CHUNK, 70, 200])
def test_delta_rule(name: str, length: int) -> None:
    query, key, value, state = (
        torch.randn(shape)
        for shape in ((2, length, 3, 8), (2, length, 3, 8), (2, length, 3, 4), (2, 3, 8, 4))
    )
    query, key = (torch.nn.functional.normalize(x, dim=-1) for x in (query, key))
    decay, beta = -torch.rand(2, length, 3, *RULES[name][1]), torch.rand(2, length, 3)
    for start in (None, state):
        wanted = _original(name)(
            query, key, value, g=decay, beta=beta, initial_state=start, output_final_state=True
        )
        found = delta_rule(query * 8**-0.5, key, value, decay, beta, start)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", RULES)
def test_delta_rule_of_one_token_again_and_again(name: str) -> None:
    key = torch.nn.functional.normalize(torch.ones(1, 100, 1, 8), dim=-1)
    value, decay = torch.randn(1, 100, 1, 4), torch.zeros(1, 100, 1, *RULES[name][1])
    output, state = delta_rule(key, key, value, decay, torch.ones(1, 100, 1), None)
    # every token overwrites what the one before has written
    torch.testing.assert_close(output, value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(key[:, -1] @ state[:, 0], value[:, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["mamba", "bamba", "rwkv", "qwen3_next"])
def test_prompts_of_other_lengths(case: str) -> None:
    model, _, sample = zoo.build(case)
    exported = DynamoExporter().export_for_generation(model, sample, {"dynamic": True})
    options: dict[str, Any] = {
        "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "output_logits": True,
        "return_dict_in_generate": True,
    }  # fmt: skip
    # eager RWKV mixes up the rows of a batch where a prompt is one token
    for length in (2 if case == "rwkv" else 1, 70, 200):
        ids = torch.randint(5, 60, (2, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones_like(ids)
        mask[0, : length // 3] = 0
        for kwargs in ({"input_ids": ids[1:]}, {"input_ids": ids, "attention_mask": mask}):
            wanted, found = (made.generate(**kwargs, **options) for made in (model, exported))
            torch.testing.assert_close(found.sequences, wanted.sequences)
            torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-4)
