from __future__ import annotations

from typing import Any

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

from polyport import DynamoConfig, DynamoExporter, structure
from polyport.capture import capture
from polyport.config import ExportConfig
from polyport.errors import ExportError, InputError
from polyport.metadata import AxisRange
from polyport.patching import applied
from polyport_dynamo.fixes import PATCHES
from polyport_dynamo.limits import beyond_limits
from polyport_dynamo.tracing import trace

DYNAMIC = ExportConfig(dynamic=True)


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def ids(*shape):
    return torch.arange(5, 5 + torch.Size(shape).numel()).reshape(shape) % 60 + 3


def traced(model, inputs, config=DYNAMIC):
    with applied(PATCHES, model):
        return trace(capture(model, inputs, config), config)


def test_one_unpadded_row_gives_any_batch_and_length(llama):
    result = traced(llama, {"input_ids": ids(1, 1), "use_cache": False})
    graph = result.program.module()

    for batch, length in ((1, 1), (3, 7), (2, 40)):
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[:, : length // 3] = 0
        inputs = {"input_ids": ids(batch, length), "attention_mask": mask}
        with torch.no_grad():
            torch.testing.assert_close(graph(**inputs).logits, llama(**inputs).logits)

    metadata = result.metadata
    assert metadata.input_names == ("input_ids", "attention_mask")
    assert metadata.inputs[1].shape == ("batch", "sequence")
    assert metadata.outputs[0].shape == ("batch", "sequence", 64)
    assert metadata.in_constants == {"use_cache": False}
    assert metadata.axes == {"batch": AxisRange(), "sequence": AxisRange()}
    assert metadata.architecture == "LlamaForCausalLM"
    assert metadata.export_dtype == "float32"


def test_decode_with_a_cache_of_any_length(llama):
    cache = DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(input_ids=ids(1, 7), cache=cache, use_cache=True)
    result = traced(llama, {"input_ids": ids(1, 1), "cache": cache, "use_cache": True})

    metadata = result.metadata
    assert metadata.input_names[2:] == (
        "cache.layers.0.keys", "cache.layers.0.values", "cache.layers.1.keys", "cache.layers.1.values",
    )  # fmt: skip
    assert metadata.axes["past"].min == 0
    info = {output.name: output for output in metadata.outputs}
    assert info["cache.layers.1.values"].shape == ("batch", 2, "past+sequence", 8)
    out = structure.load_structure(metadata.out_spec)
    assert out.num_leaves == len(metadata.outputs)

    graph = result.program.module()
    caches = [DynamicCache(config=llama.config), DynamicCache(config=llama.config)]
    with torch.no_grad():
        for each in caches:
            llama(input_ids=ids(3, 4), cache=each, use_cache=True)
        inputs = {"input_ids": ids(3, 2), "attention_mask": torch.ones(3, 6, dtype=torch.long)}
        found = graph(**inputs, cache=caches[0])
        wanted = llama(**inputs, cache=caches[1], use_cache=True)
    torch.testing.assert_close(found.logits, wanted.logits)
    assert found.cache.get_seq_length() == 6


def test_training_mode_is_put_back_and_dropout_is_off(llama):
    llama.train()
    try:
        graph = traced(llama, {"input_ids": ids(1, 5), "use_cache": False}).program.module()
        assert llama.training
        inputs = {"input_ids": ids(2, 5), "attention_mask": torch.ones(2, 5, dtype=torch.long)}
        assert torch.equal(graph(**inputs).logits, graph(**inputs).logits)
    finally:
        llama.eval()


def test_parameters_keep_their_names(llama):
    result = traced(llama, {"input_ids": ids(1, 5)})

    assert set(result.program.state_dict) <= set(llama.state_dict())
    assert "model.layers.0.mlp.up_proj.weight" in result.program.state_dict


def test_strict(llama):
    config = ExportConfig(dynamic=True, strict=True)
    graph = traced(llama, {"input_ids": ids(1, 5), "use_cache": False}, config).program.module()

    inputs = {"input_ids": ids(3, 9), "attention_mask": torch.ones(3, 9, dtype=torch.long)}
    with torch.no_grad():
        torch.testing.assert_close(graph(**inputs).logits, llama(**inputs).logits)


def test_own_bounds_hold(llama):
    batch = torch.export.Dim("batch", min=1, max=4)
    config = ExportConfig(dynamic_shapes={"input_ids": {0: batch}, "attention_mask": {0: batch}})
    result = traced(llama, {"input_ids": ids(2, 5), "use_cache": False}, config)

    assert result.metadata.inputs[0].shape == ("batch", 5)
    assert result.metadata.axes["batch"] == AxisRange(min=1, max=4)


def test_limits_of_the_model_are_ranges():
    config = BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=32,
    )  # fmt: skip
    result = traced(BertModel(config).eval(), {"input_ids": ids(1, 6)})

    assert result.metadata.axes["sequence"].max == 32


def test_a_model_is_not_run_beyond_the_positions_that_it_has_learned():
    config = BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=32,
    )  # fmt: skip
    model = BertModel(config).eval()
    lengths: set[int] = set()
    model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.add(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    call = capture(model, {"input_ids": ids(1, 6)}, DYNAMIC)
    lengths.clear()

    assert beyond_limits(call, call.sample, {"sequence": AxisRange(min=1, max=32)}) is None
    assert not lengths
    assert beyond_limits(call, call.sample, {"sequence": AxisRange(min=1, max=16)}) is not None
    assert lengths == {17}


class Embedded(PreTrainedModel):
    """Embeds its tokens; what it makes of them is up to the tests."""

    config_class = PreTrainedConfig

    def __init__(self):
        super().__init__(PreTrainedConfig())
        self.embed = torch.nn.Embedding(64, 8)
        self.post_init()


@pytest.mark.parametrize("length", [4, 9, 20])
def test_a_number_made_of_a_size_is_an_error_that_names_the_axis(length):
    """For one token the graph is right, whatever number it keeps: a slice of one token is that token."""

    class Some(Embedded):
        def forward(self, input_ids):
            return self.embed(input_ids)[:, : int(input_ids.shape[1] ** 0.5)].sum(1)

    with pytest.raises(ExportError, match=r"Axis sequence varies when Some runs, but the trace fixed it"):
        DynamoExporter().export(
            Some().eval(), {"input_ids": torch.arange(length)[None]}, DynamoConfig(dynamic=True)
        )


def test_a_frozen_axis_is_an_error_that_names_it():
    class Unrolled(Embedded):
        def forward(self, input_ids):
            state = torch.zeros(input_ids.shape[0], 8)
            for step in range(input_ids.shape[1]):
                state = state * 0.5 + self.embed(input_ids[:, step])
            return {"state": state}

    with pytest.raises(ExportError, match=r"Axis 1 of 'input_ids' \(sequence\).*fixed it to"):
        traced(Unrolled().eval(), {"input_ids": ids(1, 6)})


def test_a_branch_that_computes_the_same_is_no_guard():
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    config = Dinov2Config(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8, mlp_ratio=1
    )
    model = Dinov2Model(config).eval()
    graph = traced(model, {"pixel_values": torch.rand(1, 3, 32, 32)}).program.module()

    for shape in ((1, 3, 32, 32), (2, 3, 48, 40)):
        pixels = torch.rand(shape)
        with torch.no_grad():
            torch.testing.assert_close(graph(pixel_values=pixels)[0], model(pixel_values=pixels)[0])


@pytest.mark.parametrize("length", [1, 31, 70, 1100])
def test_the_scan_computes_the_loop(length):
    from polyport_dynamo.fixes.recurrence import linear

    torch.manual_seed(0)
    decays, inputs, start = torch.rand(2, length, 3), torch.randn(2, length, 3), torch.randn(2, 3)
    state, wanted = start, []
    for step in range(length):
        state = decays[:, step] * state + inputs[:, step]
        wanted.append(state)

    torch.testing.assert_close(linear(decays, inputs, start), torch.stack(wanted, 1))


def test_rwkv_is_computed_without_a_loop_and_stays_stable():
    from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu as loop

    from polyport_dynamo.fixes.recurrence import _wkv

    torch.manual_seed(0)
    key, value = torch.randn(2, 70, 4) * 60, torch.randn(2, 70, 4)
    decay, first = torch.randn(4), torch.randn(4)
    _, state = loop(decay, first, key[:, :9], value[:, :9], return_state=True)

    for before in (None, state):
        found, wanted = (f(decay, first, key, value, before, True) for f in (_wkv(loop), loop))
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(list(found[1]), list(wanted[1]), rtol=1e-4, atol=1e-4)


def test_a_static_cache_is_open_in_queries_and_buffers(llama):
    from transformers import StaticCache

    def call(batch, query, past):
        cache = StaticCache(config=llama.config, max_cache_len=16)
        with torch.no_grad():
            llama(input_ids=ids(batch, past), cache=cache, use_cache=True)
        mask = torch.ones(batch, past + query, dtype=torch.long)
        return {"input_ids": ids(batch, query), "attention_mask": mask, "cache": cache, "use_cache": True}

    result = traced(llama, call(1, 1, 5))
    info = {info.name: info for info in result.metadata.inputs}
    assert info["cache.layers.0.keys"].shape == ("batch", 2, "cache_length", 8)

    graph = result.program.module()
    given, same = call(1, 3, 4), call(1, 3, 4)
    with torch.no_grad():
        wanted = llama(**same).logits
        given.pop("use_cache")
        torch.testing.assert_close(graph(**given).logits, wanted)


# ── the user's own dynamic_shapes ───────────────────────────────────────────────────────────────────────────────────


def _tiny() -> Any:
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return BertModel(BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=64)).eval()


@pytest.mark.parametrize("mark", ["named", "auto", "dynamic"])
@pytest.mark.parametrize("masked", [True, False])
def test_wanted_axes_are_open_from_a_sample_of_one_row(mark: str, masked: bool) -> None:
    dim = torch.export.Dim
    batch, length = {
        "named": (dim("batch", min=1, max=8), dim("length", min=1, max=32)),
        "auto": (dim.AUTO, dim.AUTO),
        "dynamic": (dim.DYNAMIC, dim.DYNAMIC),
    }[mark]
    model, ids = _tiny(), torch.tensor([[3, 4, 5]])
    sample = {"input_ids": ids, **({"attention_mask": torch.ones_like(ids)} if masked else {})}
    shapes = {name: {0: batch, 1: length} for name in sample}
    exported = DynamoExporter().export(model, sample, DynamoConfig(dynamic_shapes=shapes))
    names = ("batch", "length" if mark == "named" else "sequence")
    assert [info.shape for info in exported["model"].metadata.inputs] == [names, names]
    for rows, tokens in ((1, 1), (1, 3), (3, 7), (8, 32)):
        inputs = torch.randint(1, 16, (rows, tokens), generator=torch.Generator().manual_seed(tokens))
        with torch.no_grad():
            wanted = model(input_ids=inputs).last_hidden_state
        found = exported(input_ids=inputs).last_hidden_state
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    if mark == "named":
        with pytest.raises(InputError, match=r"'batch' has size 9, which must be between 1 and 8"):
            exported(input_ids=torch.ones(9, 3, dtype=torch.long))


def test_lower_bound_holds() -> None:
    length = torch.export.Dim("length", min=2, max=32)
    sample = {"input_ids": torch.ones(2, 5, dtype=torch.long)}
    exported = DynamoExporter().export(
        _tiny(), sample, DynamoConfig(dynamic_shapes={"input_ids": {1: length}})
    )
    with pytest.raises(InputError, match=r"'length' has size 1, which must be between 2 and 32"):
        exported(input_ids=torch.ones(2, 1, dtype=torch.long))


def test_wanted_axis_that_the_model_fixes_is_an_error() -> None:
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ViTModel(ViTConfig(**sizes, image_size=16, patch_size=8)).eval()
    shapes = {"pixel_values": {2: torch.export.Dim.AUTO}}
    with pytest.raises(
        ExportError, match=r"dynamic_shapes wants axis 2 of 'pixel_values' open, but the trace fixed it"
    ):
        DynamoExporter().export(
            model, {"pixel_values": torch.zeros(2, 3, 16, 16)}, DynamoConfig(dynamic_shapes=shapes)
        )
