"""Four small models with random weights, one for each kind of network a backend meets, and calls to compare them by.

They are built in code: nothing is downloaded, and each takes well under a second to make and to run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

#: Token ids of the samples stay below this; every model's vocabulary is larger.
VOCABULARY = 90


@attrs.frozen(kw_only=True, eq=False)
class Example:
    """A model to export, a sample to export it with, and calls that the export must answer like the model.

    Args:
        name: What kind of model it is.
        build: Makes the model; the same weights every time.
        sample: Makes the inputs it is exported with: one row, not padded.
        cases: Makes further calls, by name. With a backend that only exports fixed sizes, just those of the sample's sizes
            are used.
        axes: Input -> {axis index: name}, as the metadata of a dynamic export must list them.
    """

    name: str
    build: Callable[[], Any]
    sample: Callable[[], dict[str, Any]]
    cases: Callable[[], dict[str, dict[str, Any]]]
    axes: Mapping[str, Mapping[int, str]]


def _model(cls: Any, config: Any) -> Any:
    """A model with weights far from their initial values.

    Fresh models have biases of 0 and norms of 1, so a backend that forgets one of them would still be right.
    """
    torch.manual_seed(0)
    model = cls(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def _tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * batch + 10 * length + seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def _text(batch: int, length: int) -> dict[str, Any]:
    return {
        "input_ids": _tokens(batch, length),
        "attention_mask": torch.ones(batch, length, dtype=torch.int64),
    }


def _left_padded(batch: int, length: int) -> dict[str, Any]:
    """The last row is whole; every row before it lacks one more token on the left."""
    inputs = _text(batch, length)
    for row in range(batch - 1):
        hidden = batch - 1 - row
        inputs["attention_mask"][row, :hidden] = 0
        inputs["input_ids"][row, :hidden] = 0
    return inputs


def _text_cases() -> dict[str, dict[str, Any]]:
    return {
        "sample's sizes": _text(1, 7),
        "batch 3": _text(3, 7),
        "longer": _text(2, 19),
        "one token": _text(1, 1),
        "left-padded": _left_padded(3, 6),
    }


def _bert() -> Any:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=64,
    )
    return _model(BertModel, config)


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
        max_position_embeddings=64,
        use_cache=False,
    )
    return _model(LlamaForCausalLM, config)


def _vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(  # type: ignore[call-arg]  # what every config takes is not in its signature
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        image_size=24,
        patch_size=8,
        num_labels=5,
    )
    return _model(ViTForImageClassification, config)


def _image(batch: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, 24, 24, generator=torch.Generator().manual_seed(batch))}


def _t5() -> Any:
    from transformers import T5Config, T5Model

    config = T5Config(  # type: ignore[call-arg]  # as above
        vocab_size=99,
        d_model=32,
        d_kv=8,
        d_ff=40,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return _model(T5Model, config)


def _pair(batch: int, length: int, decoded: int) -> dict[str, Any]:
    return {**_text(batch, length), "decoder_input_ids": _tokens(batch, decoded, seed=5)}


def _pair_cases() -> dict[str, dict[str, Any]]:
    return {
        "sample's sizes": _pair(1, 7, 4),
        "batch 3": _pair(3, 7, 4),
        "longer": _pair(2, 19, 11),
        "one token": _pair(1, 5, 1),
        "left-padded": {**_left_padded(3, 6), "decoder_input_ids": _tokens(3, 4)},
    }


_TEXT_AXES = {"input_ids": {0: "batch", 1: "sequence"}, "attention_mask": {0: "batch", 1: "sequence"}}

#: By name: an encoder of text, a decoder (causal, rotary positions, grouped heads), an image model, an encoder with a decoder.
EXAMPLES: Mapping[str, Example] = {
    example.name: example
    for example in (
        Example(name="encoder", build=_bert, sample=lambda: _text(1, 7), cases=_text_cases, axes=_TEXT_AXES),
        Example(
            name="decoder",
            build=_llama,
            # no mask, as people call it: the export must take one all the same
            sample=lambda: {"input_ids": _tokens(1, 7)},
            cases=_text_cases,
            axes=_TEXT_AXES,
        ),
        Example(
            name="image",
            build=_vit,
            sample=lambda: _image(1),
            cases=lambda: {"sample's sizes": _image(1), "batch 3": _image(3)},
            axes={"pixel_values": {0: "batch"}},
        ),
        Example(
            name="encoder-decoder",
            build=_t5,
            sample=lambda: _pair(1, 7, 4),
            cases=_pair_cases,
            axes={**_TEXT_AXES, "decoder_input_ids": {0: "batch", 1: "decoder_sequence"}},
        ),
    )
}
