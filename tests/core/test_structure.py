from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, cache_utils
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from polyport import caches, structure
from polyport.errors import ArtifactError, ExportError
from polyport.structure import dump_structure, flatten, flatten_named, leaf_names, load_structure, unflatten

SIZES = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}


def _filled(cache: Any, layers: int = 2, length: int = 3) -> Any:
    for layer in range(layers):
        value = torch.arange(2 * length * 4, dtype=torch.float32).reshape(1, 2, length, 4) + layer
        cache.update(value, value + 100, layer)
    return cache


def _dynamic() -> Any:
    return _filled(DynamicCache())


def _sliding() -> Any:
    config = LlamaConfig(**SIZES)
    config.layer_types = ["sliding_attention", "full_attention"]
    config.sliding_window = 4
    return _filled(DynamicCache(config=config))


def _static() -> Any:
    return _filled(StaticCache(config=LlamaConfig(**SIZES), max_cache_len=5))


def _encoder_decoder() -> Any:
    return EncoderDecoderCache(_filled(DynamicCache()), _filled(DynamicCache(), length=5))


def _hybrid() -> Any:
    """Attention and linear-attention layers side by side, as in Qwen3-Next."""
    config = LlamaConfig(**SIZES)
    config.layer_types = ["linear_attention", "full_attention"]
    cache = DynamicCache(config=config)
    cache.update_conv_state(torch.ones(1, 3, 4), 0)
    cache.update_recurrent_state(torch.ones(1, 2, 4, 4), 0)
    value = torch.ones(1, 2, 3, 4)
    cache.update(value, value, 1)
    return cache


CACHES = [_dynamic, _sliding, _static, _encoder_decoder, _hybrid]


@pytest.mark.parametrize("make", CACHES)
def test_caches_round_trip(make: Callable[[], Any]) -> None:
    cache = make()
    leaves, spec = flatten({"past_key_values": cache})
    assert leaves
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    again = unflatten(leaves, load_structure(dump_structure(spec)))["past_key_values"]
    assert type(again) is type(cache)
    names, renamed = flatten_named({"c": cache}), flatten_named({"c": again})
    assert [name for name, _ in names] == [name for name, _ in renamed]
    assert all(a is b for (_, a), (_, b) in zip(names, renamed, strict=True))
    assert again.get_seq_length() == cache.get_seq_length()


@pytest.mark.parametrize("make", CACHES)
def test_leaf_names_need_no_values(make: Callable[[], Any]) -> None:
    cache = make()
    _, spec = flatten({"cache": cache})
    assert leaf_names(load_structure(dump_structure(spec))) == [
        name for name, _ in flatten_named({"cache": cache})
    ]


def test_rebuilt_cache_works(tiny_llama: Any) -> None:
    """Not only the tensors come back: the model takes the cache and appends to it."""
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        cache = tiny_llama(ids[:, :3], use_cache=True).past_key_values
        leaves, spec = flatten(cache)
        again = unflatten([leaf.clone() for leaf in leaves], load_structure(dump_structure(spec)))
        expected = tiny_llama(ids[:, 3:], past_key_values=cache).logits
        got = tiny_llama(ids[:, 3:], past_key_values=again).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert again.get_seq_length() == 4


def test_outputs_round_trip() -> None:
    output = CausalLMOutputWithPast(
        logits=torch.ones(1), past_key_values=_dynamic(), hidden_states=(torch.ones(2), torch.ones(3))
    )
    leaves, spec = flatten(output)
    again = unflatten(leaves, load_structure(dump_structure(spec)))
    assert type(again) is CausalLMOutputWithPast
    assert list(again) == list(output)
    assert isinstance(again.hidden_states, tuple)
    assert again.loss is None


def test_containers_round_trip() -> None:
    value = {
        "a": (torch.ones(1), [torch.ones(2)]),
        "b": OrderedDict(x=torch.ones(3)),
        "c": {1: torch.ones(4)},
    }
    leaves, spec = flatten(value)
    again = unflatten(leaves, load_structure(dump_structure(spec)))
    assert type(again["b"]) is OrderedDict
    assert again["c"][1] is leaves[-1]
    assert type(again["a"]) is tuple
    assert type(again["a"][1]) is list


def test_names_are_dotted_paths() -> None:
    names = [name for name, _ in flatten_named({"x": torch.ones(1), "cache": _encoder_decoder()})]
    assert names[0] == "x"
    assert "cache.self_attention_cache.layers.0.keys" in names
    assert "cache.cross_attention_cache.layers.1.values" in names


def test_same_structure_same_text() -> None:
    assert dump_structure(flatten(_static())[1]) == dump_structure(flatten(_static())[1])


def test_structures_compare_equal_after_a_round_trip() -> None:
    _, spec = flatten({"cache": _dynamic(), "x": torch.ones(1)})
    assert load_structure(dump_structure(spec)) == spec


def test_caches_that_hold_something_else() -> None:
    cache = _dynamic()
    cache.layers[0].quantizer = object()
    with pytest.raises(ExportError, match=r"holds builtins\.object at 'layers\.0\.quantizer'.*DynamicCache"):
        flatten(cache)


def test_a_users_own_cache_is_no_container() -> None:
    class MyCache(DynamicCache):
        pass

    cache = MyCache()
    assert flatten(cache)[0] == [cache]


# ── from a hostile file ─────────────────────────────────────────────────────────────────────────────────────────────


def _node(kind: Any, context: Any, children: list[Any]) -> dict[str, Any]:
    return {"type": kind, "context": json.dumps(context), "children_spec": children}


LEAF = {"type": None, "context": None, "children_spec": []}


def _text(node: Any, version: Any = 1) -> str:
    return json.dumps([version, node])


def _cache_node(**changes: Any) -> dict[str, Any]:
    document = json.loads(dump_structure(flatten(_filled(DynamicCache(), layers=1))[1]))
    node: dict[str, Any] = document[1]
    return {**node, **changes}


@pytest.mark.parametrize(
    "kind",
    [
        "os.system",
        "subprocess.Popen",
        "builtins.eval",
        "builtins.set",
        "collections.defaultdict",
        "collections.deque",
        "torch.nn.modules.linear.Linear",
        "transformers.models.bert.modeling_bert.BertModel",
        "transformers.BertConfig",
        "transformers.cache_utils.Cache.__class__",
        "transformers:os.system",
        "",
        3,
        ["builtins.dict"],
        {"a": 1},
        True,
    ],
)
def test_unknown_class(kind: Any) -> None:
    with pytest.raises(ArtifactError):
        load_structure(_text(_node(kind, ["a"], [LEAF])))


def test_unknown_class_says_so() -> None:
    with pytest.raises(
        ArtifactError, match=r"names the class 'os\.system', which is no output or cache class"
    ):
        load_structure(_text(_node("os.system", ["a"], [LEAF])))


OUTPUT = "transformers.modeling_outputs.BaseModelOutput"


@pytest.mark.parametrize(
    "node",
    [
        None,
        [],
        "text",
        7,
        {},
        {"type": "builtins.dict"},
        {"type": "builtins.dict", "context": "[", "children_spec": []},
        {"type": "builtins.dict", "context": None, "children_spec": []},
        {"type": "builtins.dict", "context": "[]", "children_spec": None},
        _node("builtins.dict", ["a"], []),
        _node("builtins.dict", [], [LEAF]),
        _node("builtins.dict", None, []),
        _node("builtins.dict", "a", [LEAF]),
        _node("builtins.dict", {"a": 1}, [LEAF]),
        _node("builtins.dict", [["a"]], [LEAF]),
        _node("builtins.dict", [{"__enum__": True, "fqn": "os:system"}], [LEAF]),
        _node("builtins.dict", ["a", "a"], [LEAF, LEAF]),
        _node("builtins.tuple", {"__enum__": True, "fqn": "os:system"}, [LEAF]),
        _node("builtins.list", 1, [LEAF]),
        _node(OUTPUT, ["__class__"], [LEAF]),
        _node(OUTPUT, ["no_such_field"], [LEAF]),
        _node(OUTPUT, [0], [LEAF]),
        # an output as a cache, and a cache as an output
        _node("transformers.modeling_outputs:BaseModelOutput", "{}", [LEAF]),
        _node("transformers.cache_utils.DynamicCache", ["layers"], [LEAF]),
        # a layer is part of a cache, and no container of its own
        _node("transformers.cache_utils:DynamicLayer", {"_t": "tensor", "i": 0}, [LEAF]),
    ],
)
def test_damaged(node: Any) -> None:
    with pytest.raises(ArtifactError):
        load_structure(_text(node))


@pytest.mark.parametrize("text", ["", "{", "[]", "[1]", "1", "null", "[1, 2, 3]", "[" * 100_000])
def test_no_structure_at_all(text: str) -> None:
    with pytest.raises(ArtifactError):
        load_structure(text)


def test_another_version() -> None:
    with pytest.raises(ArtifactError, match="version 2, not 1"):
        load_structure(_text(LEAF, version=2))


def test_nested_too_deep() -> None:
    node: Any = LEAF
    for _ in range(80):
        node = _node("builtins.tuple", None, [node])
    with pytest.raises(ArtifactError, match="larger than any model's"):
        load_structure(_text(node))


def test_too_many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "_MAX_NODES", 10)
    with pytest.raises(ArtifactError, match="larger than any model's"):
        load_structure(_text(_node("builtins.tuple", None, [LEAF] * 11)))


@pytest.mark.parametrize(
    "context",
    [
        "[" * 100_000,
        "{}",
        "7",
        '{"_t": "obj", "p": "os:system", "s": {}}',
        '{"_t": "class", "p": "subprocess:Popen"}',
        '{"_t": "obj", "p": "transformers.cache_utils:DynamicCache", "s": []}',
        '{"_t": "obj", "p": "transformers.cache_utils:DynamicCache", "s": {"x": {"_t": "pickle", "v": "gA"}}}',
        '{"_t": "obj", "p": "transformers.cache_utils:DynamicCache", "s": {"x": {"_t": "device", "s": "toaster"}}}',
        '{"_t": "obj", "p": "transformers.cache_utils:DynamicCache", "s": {"x": {"_t": "dtype", "s": "load"}}}',
        '{"_t": "obj", "p": "transformers.cache_utils:DynamicCache", "s": {"x": {"_t": "tensor", "i": 9}}}',
        '{"_t": "obj", "p": "transformers.cache_utils:DynamicCache", "s": {"x": {"_t": "tensor", "i": -1}}}',
        '{"_t": "obj", "p": "transformers.cache_utils:DynamicCache", "s": {"x": {"_t": "tensor", "i": "0"}}}',
        '{"_t": "obj", "p": "transformers.cache_utils:DynamicCache", "s": {"x": {"_t": "dict", "v": [[[], 1]]}}}',
        '{"_t": "obj", "p": "transformers.cache_utils:DynamicCache", "s": {}}',
        # another class than the node's
        '{"_t": "obj", "p": "transformers.cache_utils:StaticCache", '
        '"s": {"a": {"_t": "tensor", "i": 0}, "b": {"_t": "tensor", "i": 1}}}',
    ],
)
def test_hostile_cache_description(context: str) -> None:
    with pytest.raises(ArtifactError):
        load_structure(_text(_cache_node(context=context)))


def test_wrong_number_of_tensors() -> None:
    for children in ([], [LEAF], [LEAF] * 3):
        with pytest.raises(ArtifactError, match="damaged"):
            load_structure(_text(_cache_node(children_spec=children)))


def test_no_constructor_of_a_cache_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, spec = flatten(_sliding())
    text = dump_structure(spec)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a constructor was called")

    for name in ("DynamicCache", "DynamicLayer", "DynamicSlidingWindowLayer"):
        monkeypatch.setattr(getattr(cache_utils, name), "__init__", fail)
    again = unflatten(leaves, load_structure(text))
    assert type(again.layers[0]).__name__ == "DynamicSlidingWindowLayer"


def test_dtypes_by_name() -> None:
    assert caches.find_dtype("bfloat16") is torch.bfloat16
    for name in ("load", "os", "", "torch.float32", None, 3):
        with pytest.raises(ArtifactError, match="dtype"):
            caches.find_dtype(name)


def test_find_class_among_transformers_only() -> None:
    assert caches.find_class(OUTPUT) is BaseModelOutput
    assert caches.find_class("transformers.cache_utils:StaticCache") is StaticCache

    class Output(BaseModelOutput):
        pass

    with pytest.raises(ArtifactError):
        caches.find_class(f"{Output.__module__}.{Output.__qualname__}")
