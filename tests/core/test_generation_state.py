"""Models that keep state inside of their modules, which no component can take or return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from polyport.errors import ExportError
from polyport.generation.decompose import decompose_for_generation

SAMPLE = {"input_ids": torch.tensor([[3, 5, 7, 2]])}


@pytest.fixture
def gemma() -> Any:
    torch.manual_seed(0)
    config = RecurrentGemmaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, lru_width=16,
        num_key_value_heads=1, head_dim=8, block_types=["recurrent", "attention"], attention_window_size=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return RecurrentGemmaForCausalLM(config).eval()


def _attributes(model: torch.nn.Module) -> list[dict[str, int]]:
    tables = (dict, bool)
    return [
        {k: id(v) for k, v in vars(module).items() if not isinstance(v, tables)} for module in model.modules()
    ]


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "after other calls"])
@pytest.mark.parametrize("several", [False, True], ids=["one token", "several tokens"])
def test_state_inside_of_modules_is_refused(gemma: Any, used: bool, several: bool) -> None:
    if used:
        gemma.generate(**SAMPLE, max_new_tokens=1)
    before = _attributes(gemma)
    with pytest.raises(ExportError, match=r"inside of its modules.*layers\.0\.temporal_block\.conv1d_state"):
        decompose_for_generation(gemma, SAMPLE, multi_token_decode=several)
    assert _attributes(gemma) == before


class _Cached(LlamaForCausalLM):
    """Keeps a tensor of the last call, as masks and frequencies are kept, without depending on it."""

    last: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        self.last = outputs.logits
        return outputs


class _Remembering(_Cached):
    """Depends on what the prompt left behind, which calls after it leave alone."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = LlamaForCausalLM.forward(self, *args, **kwargs)
        if outputs.logits.shape[1] > 1:
            self.last = outputs.logits[:, :1]
        elif self.last is not None:
            outputs.logits = outputs.logits + self.last
        return outputs


def _llama(cls: Any) -> Any:
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return cls(config).eval()


def test_what_is_kept_but_not_used_is_let_through() -> None:
    model = _llama(_Cached)
    assert list(decompose_for_generation(model, SAMPLE)) == ["prefill", "decode"]
    assert model.last is None


def test_what_only_a_prompt_leaves_behind_is_refused() -> None:
    with pytest.raises(ExportError, match="inside of its modules"):
        decompose_for_generation(_llama(_Remembering), SAMPLE)


def test_weights_that_a_first_call_rewrites_stay_in_step_with_their_flag() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "attention_hidden_size": 16, "intermediate_size": 16}
    config = RwkvConfig(**sizes, num_hidden_layers=5, rescale_every=2)
    model, other = (RwkvForCausalLM(config).eval() for _ in range(2))
    other.load_state_dict(model.state_dict())
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    for _ in range(2):
        decompose_for_generation(model, SAMPLE)
    with torch.no_grad():
        torch.testing.assert_close(model(**SAMPLE).logits, other(**SAMPLE).logits)
