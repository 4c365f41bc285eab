from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from polyport.capture import capture, tensor_leaves
from polyport.config import ExportConfig
from polyport.errors import ExportError, InputError

DYNAMIC = ExportConfig(dynamic=True)


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def bert():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32,
    )  # fmt: skip
    return BertModel(config).eval()


class Pixels(PreTrainedModel):
    """A convolution and a mean, so that batch and image size vary and channels don't."""

    config_class = PreTrainedConfig

    def __init__(self, fail=None):
        super().__init__(PreTrainedConfig())
        self.conv = torch.nn.Conv2d(3, 4, 3, stride=2)
        self.fail = fail
        self.seen = []
        self.register_buffer("calls", torch.zeros(()))
        self.post_init()

    def forward(self, pixel_values, bool_masked_pos=None):
        self.calls += 1
        self.seen = [*self.seen, pixel_values.shape]
        if self.fail is not None and len(self.seen) > 1:
            raise self.fail
        return {"logits": self.conv(pixel_values).mean((-1, -2))}


def ids(*shape):
    return torch.arange(5, 5 + torch.Size(shape).numel()).reshape(shape) % 60 + 3


def test_a_single_unpadded_sample_opens_batch_and_sequence(llama):
    call = capture(llama, {"input_ids": ids(1, 1)}, DYNAMIC)

    assert call.axes == {
        "input_ids": {0: "batch", 1: "sequence"},
        "attention_mask": {0: "batch", 1: "sequence"},
    }
    assert list(call.kwargs) == ["input_ids", "attention_mask"]
    assert call.defaults == {"attention_mask": "ones_like:input_ids"}
    assert all(size >= 2 for size in call.kwargs["input_ids"].shape)
    assert call.sample["attention_mask"].tolist() == [[1]]
    assert call.ranges["batch"].min == 1


def test_a_given_mask_has_the_same_interface_as_none(bert):
    given = capture(
        bert, {"input_ids": ids(2, 6), "attention_mask": torch.ones(2, 6, dtype=torch.long)}, DYNAMIC
    )
    left_out = capture(bert, {"input_ids": ids(2, 6)}, DYNAMIC)

    assert given.axes == left_out.axes
    assert given.defaults == left_out.defaults


def test_trace_sizes_equal_nothing_in_the_config(bert):
    call = capture(
        bert, {"input_ids": ids(1, 31)}, DYNAMIC
    )  # the next prime is past the 32 positions of the model

    assert 2 <= call.kwargs["input_ids"].shape[1] <= 32
    assert call.axes["input_ids"] == {0: "batch", 1: "sequence"}


def test_cache_mask_and_positions_move_together(llama):
    cache = DynamicCache(config=llama.config)
    llama(input_ids=ids(1, 7), cache=cache, use_cache=True)
    before = [layer.keys.clone() for layer in cache.layers]
    inputs = {
        "input_ids": ids(1, 1), "cache": cache, "position_ids": torch.tensor([[7]]), "use_cache": True,
    }  # fmt: skip

    call = capture(llama, inputs, DYNAMIC)

    assert call.axes["attention_mask"] == {0: "batch", 1: "past+sequence"}
    assert call.axes["cache.layers.0.keys"] == {0: "batch", 2: "past"}
    assert call.ranges["past"].min == 0
    past, sequence = call.kwargs["cache"].get_seq_length(), call.kwargs["input_ids"].shape[1]
    assert call.kwargs["attention_mask"].shape[1] == past + sequence
    assert call.kwargs["position_ids"][0].tolist() == list(range(past, past + sequence))
    assert call.defaults == {"attention_mask": "ones:batch,past+sequence"}
    assert cache.get_seq_length() == 7
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))


def test_image_sizes_vary_and_channels_do_not():
    call = capture(Pixels(), {"pixel_values": torch.rand(1, 3, 32, 32)}, DYNAMIC)

    assert call.axes == {"pixel_values": {0: "batch", 2: "height", 3: "width"}}
    height, width = call.kwargs["pixel_values"].shape[2:]
    assert height != width


def test_static_by_default(bert):
    call = capture(bert, {"input_ids": ids(1, 6)}, ExportConfig())

    assert call.axes == {}
    assert call.dynamic_shapes is None
    assert call.kwargs["input_ids"].shape == (1, 6)


def test_arrays_and_tokenizer_outputs(bert):
    from transformers import BatchEncoding

    call = capture(bert, BatchEncoding({"input_ids": ids(1, 6).numpy()}), ExportConfig())

    assert isinstance(call.kwargs["input_ids"], torch.Tensor)


@pytest.mark.parametrize("fail", [None, ValueError("no"), KeyboardInterrupt()])
def test_the_model_comes_back_as_it_was(fail):
    model = Pixels(fail).train()
    pixels = torch.rand(1, 3, 32, 32)
    inputs = {"pixel_values": pixels}
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    if fail is None:
        capture(model, inputs, DYNAMIC)
    else:
        with pytest.raises((ExportError, KeyboardInterrupt)):
            capture(model, inputs, DYNAMIC)

    assert model.training
    assert model.seen == []
    assert inputs == {"pixel_values": pixels}
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_model_that_takes_one_batch_only_says_so():
    with pytest.raises(ExportError, match="twice in one batch"):
        capture(Pixels(ValueError("no")), {"pixel_values": torch.rand(1, 3, 32, 32)}, DYNAMIC)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"input_id": ids(1, 4)}, InputError, "Did you mean 'input_ids'"),
        ({"input_ids": ids(1, 4), "attention_msk": ids(1, 4)}, InputError, "Did you mean 'attention_mask'"),
        ({"input_ids": ids(1, 4), "labels": ids(1, 4)}, ExportError, "loss"),
        ({"use_cache": False}, InputError, "itself fails on these inputs"),
        ([1, 2], InputError, "keyword arguments"),
    ],
)
def test_refused_inputs(llama, inputs, error, message):
    with pytest.raises(error, match=message):
        capture(llama, inputs, DYNAMIC)


def test_a_required_input_is_named():
    with pytest.raises(InputError, match="needs the input 'pixel_values'"):
        capture(Pixels(), {}, DYNAMIC)


def test_flash_attention_is_refused_with_what_to_use():
    model = Pixels()
    model.config._attn_implementation_internal = "flash_attention_2"

    with pytest.raises(ExportError, match=r'"sdpa" or "eager"'):
        capture(model, {"pixel_values": torch.rand(1, 3, 8, 8)}, DYNAMIC)


def test_meta_weights_are_refused():
    with pytest.raises(ExportError, match="meta device"):
        capture(Pixels().to("meta"), {"pixel_values": torch.rand(1, 3, 8, 8)}, DYNAMIC)


def test_own_shapes_are_checked_by_name(bert):
    batch = torch.export.Dim("batch", min=1, max=8)

    call = capture(bert, {"input_ids": ids(2, 6)}, ExportConfig(dynamic_shapes={"input_ids": {0: batch}}))
    # the mask that is added to the call goes along with its tokens
    assert call.dynamic_shapes == {"input_ids": {0: batch}, "attention_mask": {0: batch}}

    masked = {"input_ids": ids(2, 6), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    call = capture(bert, masked, ExportConfig(dynamic_shapes={"input_ids": {0: batch}}))
    assert call.dynamic_shapes == {"input_ids": {0: batch}, "attention_mask": None}

    with pytest.raises(ExportError, match="Did you mean 'input_ids'"):
        capture(bert, {"input_ids": ids(2, 6)}, ExportConfig(dynamic_shapes={"input_idz": {0: batch}}))


def test_leaves_are_named_in_order(llama):
    call = capture(
        llama, {"attention_mask": torch.ones(2, 4, dtype=torch.long), "input_ids": ids(2, 4)}, DYNAMIC
    )

    assert list(tensor_leaves(call.kwargs)) == ["attention_mask", "input_ids"]


def test_segments_may_be_left_out_where_the_model_takes_zeros(bert):
    sample = {"input_ids": ids(2, 6), "token_type_ids": torch.ones(2, 6, dtype=torch.long)}

    call = capture(bert, sample, DYNAMIC)

    assert call.defaults == {
        "attention_mask": "ones_like:input_ids",
        "token_type_ids": "zeros_like:input_ids",
    }
