"""Steps of a generation: caches that are written where they lie, and caches that come back as they were."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

from polyport import ExportedModel, OnnxConfig, OnnxExporter, structure
from polyport.errors import ArtifactError
from polyport.metadata import ExportMetadata, TensorInfo
from polyport.pipeline import RunRequest
from polyport_dynamo.lowering import Leaves, preparing
from polyport_dynamo.lowering.functionalize import NotLocal
from polyport_onnx.lowering import Lowered, lower_program
from polyport_onnx.overwrite import may_overwrite
from polyport_onnx.runner import SessionRunner

LENGTH, WINDOW = 24, 8
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


# ── models ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def sliding() -> Any:
    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=WINDOW, layer_types=layers)
    return Gemma3ForCausalLM(config).eval()


def static_cache(model: Any, batch: int) -> Any:
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    cache.early_initialization(
        batch_size=batch, num_heads=2, head_dim=8, dtype=torch.float32, device=torch.device("cpu")
    )
    return cache


def step(model: Any, cache: Any, past: int, batch: int, query: int) -> dict[str, Any]:
    """Inputs for some more tokens, different ones for each place."""
    positions = torch.arange(past, past + query)
    mask = (torch.arange(LENGTH) <= positions[:, None]).expand(batch, 1, query, LENGTH)
    masks: Any = mask
    if isinstance(model, Gemma3ForCausalLM):
        masks = {"full_attention": mask, "sliding_attention": mask[..., :WINDOW]}
    ids = (7 * torch.arange(batch)[:, None] + 5 * positions) % 63 + 1
    return {
        "input_ids": ids, "attention_mask": masks, "position_ids": positions.repeat(batch, 1), "cache": cache,
        "use_cache": True,
    }  # fmt: skip


def exported(model: Any) -> ExportedModel:
    return OnnxExporter().export(
        model, step(model, static_cache(model, 2), 0, 2, 3), OnnxConfig(dynamic=True)
    )


def leaves(cache: Any) -> dict[str, Tensor]:
    return {
        name: leaf for name, leaf in structure.flatten_named({"cache": cache}) if isinstance(leaf, Tensor)
    }


def record(export: ExportedModel) -> dict[str, Any]:
    return export["model"].metadata.backend


def assert_same_steps(
    model: Any,
    export: ExportedModel,
    caches: Sequence[Any],
    inputs: Callable[[Any, int, int], dict[str, Any]],
    *queries: int,
) -> None:
    """Eager with the first cache and the export with the second compute the same and leave the same behind."""
    theirs, ours = caches
    past = 0
    places = {name: leaf.data_ptr() for name, leaf in leaves(ours).items()}
    for query in queries:
        with torch.no_grad():
            expected = model(**inputs(theirs, past, query))
        got = export(**inputs(ours, past, query))
        past += query
        torch.testing.assert_close(got.logits, expected.logits, atol=1e-5, rtol=1e-5)
        returned = leaves(got.cache)
        for name, leaf in leaves(theirs).items():
            torch.testing.assert_close(
                leaves(ours)[name], leaf, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
            assert returned[name] is leaves(ours)[name], name
    assert {name: leaf.data_ptr() for name, leaf in leaves(ours).items()} == places


@pytest.fixture(scope="module", params=[llama, sliding], ids=["full", "sliding"])
def stepping(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, ExportedModel, Path]:
    model = request.param()
    folder = tmp_path_factory.mktemp("step") / "export"
    export = exported(model)
    export.save_pretrained(folder)
    return model, export, folder


# ── in place ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("source", ["fresh", "loaded"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("queries", [(5, 1, 1), (1, 5, 1)], ids=str)
def test_static_cache_is_written_in_place(
    stepping: tuple[Any, ExportedModel, Path], source: str, batch: int, queries: tuple[int, ...]
) -> None:
    model, export, folder = stepping
    if source == "loaded":
        export = ExportedModel.from_pretrained(folder)
    caches = [static_cache(model, batch) for _ in range(2)]
    assert_same_steps(model, export, caches, lambda c, past, q: step(model, c, past, batch, q), *queries)
    assert caches[1].layers[1].cumulative_length == sum(queries)
    assert caches[1].layers[1].keys[:, :, : sum(queries)].abs().min() > 0


def test_what_the_record_says(stepping: tuple[Any, ExportedModel, Path]) -> None:
    model, export, folder = stepping
    names = list(leaves(static_cache(model, 1)))
    assert list(export["model"].metadata.in_place) == names
    assert record(export)["passed_through"] == {name: name for name in names}
    assert export["model"].metadata.output_names == ("logits", *names)
    graph = export.program.graph
    assert [value.name for value in graph.outputs] == ["logits", *(f"output.{name}" for name in names)]
    assert {value.name for value in graph.inputs} >= {f"input.{name}" for name in names}
    loaded = ExportedModel.from_pretrained(folder)
    assert loaded["model"].metadata.backend == export["model"].metadata.backend


def test_large_buffers_are_written_by_the_session_itself(stepping: tuple[Any, ExportedModel, Path]) -> None:
    """Counters are read by what must not come before they are raised; they alone go another way."""
    _, export, _ = stepping
    runner = export.caller("model").runner
    assert isinstance(runner, SessionRunner)
    aside = {export["model"].metadata.input_names[index] for index in runner._run_bound._aside}
    assert aside <= {f"cache.layers.{layer}.cumulative_length" for layer in range(2)}


def test_in_a_fresh_process(stepping: tuple[Any, ExportedModel, Path], tmp_path: Path) -> None:
    model, _, folder = stepping
    cache, ours = static_cache(model, 3), static_cache(model, 3)
    inputs = step(model, ours, 0, 3, 5)
    with torch.no_grad():
        expected = model(**step(model, cache, 0, 3, 5)).logits
    torch.save((inputs, expected, leaves(cache)), tmp_path / "case.pt")
    code = (
        "import sys, torch\n"
        "from polyport import ExportedModel, structure\n"
        "export = ExportedModel.from_pretrained(sys.argv[1])\n"
        "inputs, expected, wanted = torch.load(sys.argv[2], weights_only=False)\n"
        "torch.testing.assert_close(export(**inputs).logits, expected, atol=1e-5, rtol=1e-5)\n"
        "found = dict(structure.flatten_named({'cache': inputs['cache']}))\n"
        "for name, leaf in wanted.items():\n"
        "    torch.testing.assert_close(found[name], leaf, atol=1e-5, rtol=1e-5)\n"
    )
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "case.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


def test_threads_with_caches_of_their_own(stepping: tuple[Any, ExportedModel, Path]) -> None:
    model, export, _ = stepping
    queries = (1, 3, 1, 1, 1)

    def work(number: int) -> None:
        batch = number % 3 + 1
        caches = [static_cache(model, batch) for _ in range(2)]
        assert_same_steps(model, export, caches, lambda c, past, q: step(model, c, past, batch, q), *queries)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(24)))


def test_a_cache_that_is_gone_is_not_written_to(stepping: tuple[Any, ExportedModel, Path]) -> None:
    """Addresses are remembered from call to call; another tensor may lie there by then."""
    model, export, _ = stepping
    for _ in range(20):
        caches = [static_cache(model, 2) for _ in range(2)]
        assert_same_steps(model, export, caches, lambda c, past, q: step(model, c, past, 2, q), 2, 1)
        kept = static_cache(model, 2)
        before = {name: leaf.clone() for name, leaf in leaves(kept).items()}
        export(**step(model, static_cache(model, 2), 0, 2, 1))
        assert all(torch.equal(leaf, before[name]) for name, leaf in leaves(kept).items())


def test_half_precision() -> None:
    model = llama().half()
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    cache.early_initialization(
        batch_size=2, num_heads=2, head_dim=8, dtype=torch.float16, device=torch.device("cpu")
    )
    theirs, ours = copy.deepcopy(cache), copy.deepcopy(cache)
    export = OnnxExporter().export(model, step(model, cache, 0, 2, 3), OnnxConfig(dynamic=True))
    with torch.no_grad():
        expected = model(**step(model, theirs, 0, 2, 4)).logits
    torch.testing.assert_close(export(**step(model, ours, 0, 2, 4)).logits, expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(ours.layers[0].keys, theirs.layers[0].keys, atol=1e-2, rtol=1e-2)


def test_states_of_linear_attention() -> None:
    torch.manual_seed(0)
    config = JambaConfig(
        **SIZES, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        num_experts=2, mamba_d_state=4, mamba_d_conv=4, mamba_dt_rank=4, use_mamba_kernels=False,
    )  # fmt: skip
    model = JambaForCausalLM(config).eval()

    def filled(batch: int) -> Any:
        cache = StaticCache(config=config, max_cache_len=LENGTH)
        with torch.no_grad():
            model(
                input_ids=torch.arange(1, 5 * batch + 1).reshape(batch, 5) % 64, cache=cache, use_cache=True
            )
        return cache

    export = OnnxExporter().export(model, step(model, filled(2), 5, 2, 1), OnnxConfig(dynamic=True))
    assert {name.split(".")[3] for name in export["model"].metadata.in_place} == {
        "conv_states", "recurrent_states", "keys", "values", "cumulative_length"
    }  # fmt: skip
    for batch in (1, 3):
        caches = [filled(batch), filled(batch)]
        assert_same_steps(
            model, export, caches, lambda c, past, q, b=batch: step(model, c, 5 + past, b, q), 1, 1, 1
        )


# ── passed through ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def t5() -> Any:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config).eval()


def decoding(model: Any, own: Any, batch: int) -> Callable[[int, int], dict[str, Any]]:
    """What makes the inputs of a step of a decoder, whose cross-attention has seen the encoder's output."""
    cross = DynamicCache()
    cache = EncoderDecoderCache(own, cross)
    ids = torch.arange(1, 6 * batch + 1).reshape(batch, 6) % 64
    with torch.no_grad():
        hidden = model.encoder(ids).last_hidden_state
        for index, block in enumerate(model.decoder.block):
            attention = block.layer[1].EncDecAttention
            split = [
                part(hidden).view(batch, -1, 4, 8).transpose(1, 2) for part in (attention.k, attention.v)
            ]
            cross.update(split[0].contiguous(), split[1].contiguous(), index)
            cache.is_updated[index] = True

    def inputs(past: int, query: int) -> dict[str, Any]:
        tokens = (5 * torch.arange(past, past + query) + 7 * torch.arange(batch)[:, None]) % 63 + 1
        return {
            "decoder_input_ids": tokens, "encoder_outputs": (hidden,), "attention_mask": torch.ones_like(ids),
            "cache": cache, "use_cache": True,
        }  # fmt: skip

    return inputs


def test_cross_attention_comes_back_as_it_was(t5: Any, tmp_path: Path) -> None:
    inputs = decoding(t5, DynamicCache(), 2)
    export = OnnxExporter().export(t5, inputs(0, 2), OnnxConfig(dynamic=True))
    passed = record(export)["passed_through"]
    crossing = [
        f"cache.cross_attention_cache.layers.{i}.{kind}" for i in range(2) for kind in ("keys", "values")
    ]
    assert {name: passed[name] for name in crossing} == {name: name for name in crossing}
    assert not export["model"].metadata.in_place
    produced = {value.name for value in export.program.graph.outputs}
    assert not any("cross" in str(name) for name in produced)
    assert set(crossing) < set(export["model"].metadata.output_names)
    export.save_pretrained(tmp_path / "out")
    for runs in (export, ExportedModel.from_pretrained(tmp_path / "out")):
        for batch, query in ((1, 1), (3, 5)):
            inputs = decoding(t5, DynamicCache(), batch)
            given = inputs(0, query)
            got = runs(**given)
            with torch.no_grad():
                expected = t5(**decoding(t5, DynamicCache(), batch)(0, query))
            torch.testing.assert_close(got.logits, expected.logits, atol=1e-5, rtol=1e-5)
            for name in crossing:
                assert leaves(got.cache)[name] is leaves(given["cache"])[name]


def test_static_caches_of_encoder_and_decoder(t5: Any) -> None:
    def own(batch: int) -> Any:
        cache = StaticCache(config=t5.config, max_cache_len=LENGTH)
        cache.early_initialization(
            batch_size=batch, num_heads=4, head_dim=8, dtype=torch.float32, device=torch.device("cpu")
        )
        return cache

    theirs, ours, sample = (decoding(t5, own(2), 2) for _ in range(3))
    export = OnnxExporter().export(t5, sample(0, 3), OnnxConfig())
    assert {name.split(".")[1] for name in export["model"].metadata.in_place} == {"self_attention_cache"}
    for past in (0, 3, 6):
        with torch.no_grad():
            expected = t5(**theirs(past, 3)).logits
        torch.testing.assert_close(export(**ours(past, 3)).logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(leaves(ours(0, 1)["cache"]), leaves(theirs(0, 1)["cache"]))


# ── programs by hand ────────────────────────────────────────────────────────────────────────────────────────────────


def lowered(function: Callable[..., Any], *args: Tensor, outputs: Sequence[str], **options: Any) -> Lowered:
    class Module(nn.Module):
        def forward(self, *args: Tensor) -> Any:
            return function(*args)

    with torch.no_grad():
        program = torch.export.export(Module().eval(), tuple(arg.clone() for arg in args), strict=False)
    return lower_program(
        program,
        input_names=[f"x{index}" for index in range(len(args))],
        output_names=list(outputs),
        axes={},
        **options,
    )


def runner(made: Lowered, args: Sequence[Tensor], results: Sequence[Tensor]) -> SessionRunner:
    def infos(names: Sequence[str], tensors: Sequence[Tensor]) -> tuple[TensorInfo, ...]:
        pairs = zip(names, tensors, strict=True)
        return tuple(TensorInfo(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in pairs)

    metadata = ExportMetadata(
        inputs=infos(made.leaves.inputs, args), outputs=infos(made.leaves.outputs, results)
    )
    return SessionRunner(made.model, made.leaves.recorded(metadata), RunRequest())


def _counts(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def _returns_old_and_new(x: Tensor) -> tuple[Tensor, Tensor]:
    old = x.clone()
    return old, x.mul_(3)


def _swaps(x: Tensor, y: Tensor) -> Tensor:
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)
    return x - y


def _shifts(x: Tensor, y: Tensor) -> Tensor:
    x.copy_(torch.cat([x[:, 1:], y[:, :1]], 1))
    return x.sum(1)


def _rolls(x: Tensor) -> Tensor:
    x.copy_(x.roll(1, 0))
    return x + 0


def _through_views(x: Tensor) -> Tensor:
    x[1:, 2].zero_()
    x.view(-1)[0] = 9
    return x.max()


def _reads_before_and_after(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    before = x.softmax(-1)
    x.index_copy_(1, torch.tensor([2, 0]), y[:, :2])
    return before, x.softmax(-1)


def _one_into_two(x: Tensor, y: Tensor) -> Tensor:
    both = (x @ y.T) / 5
    x.copy_(both[:, :5])
    y.copy_(both[:, :5])
    return both


def _returns_both_and_a_copy(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x.sub_(y)
    return x, y, x.clone()


@pytest.mark.parametrize(
    "function",
    [_counts, _returns_old_and_new, _swaps, _shifts, _rolls, _through_views, _reads_before_and_after, _one_into_two,
     _returns_both_and_a_copy],
)  # fmt: skip
@pytest.mark.parametrize("way", ["local", "whole"])
def test_same_as_torch(function: Callable[..., Any], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "whole":

        def refuse(graph: Any) -> Any:
            raise NotLocal("asked for")

        monkeypatch.setattr(preparing, "functionalize", refuse)
    count = function.__code__.co_argcount
    args = [torch.randn(5, 5) for _ in range(count)]
    theirs, ours = [[arg.clone() for arg in args] for _ in range(2)]
    expected = function(*theirs)
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    made = lowered(function, *args, outputs=[f"y{index}" for index in range(len(expected))])
    changed = [not torch.equal(arg, after) for arg, after in zip(args, theirs, strict=True)]
    assert made.leaves.in_place == tuple(f"x{i}" for i, is_changed in enumerate(changed) if is_changed)
    run = runner(made, args, expected)
    places = [arg.data_ptr() for arg in ours]
    for _ in range(3):
        for got, want in zip(run(ours), expected, strict=True):
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
        for got, want in zip(ours, theirs, strict=True):
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
        again = function(*theirs)
        expected = list(again) if isinstance(again, tuple) else [again]
    assert [arg.data_ptr() for arg in ours] == places


def test_a_copy_is_not_the_callers_tensor() -> None:
    args = [torch.randn(5, 5), torch.randn(5, 5)]
    made = lowered(_returns_both_and_a_copy, *args, outputs=["a", "b", "c"])
    assert made.leaves.passed_through == {"a": "x0", "b": "x1"}
    ours = [arg.clone() for arg in args]
    run = runner(made, args, [args[0]] * 3)
    a, b, c = run(ours)
    assert a is ours[0]
    assert b is ours[1]
    kept = c.clone()
    run(ours)
    assert torch.equal(c, kept)


def test_an_output_of_the_name_that_is_something_else() -> None:
    args = [torch.randn(3)]
    made = lowered(_counts, *args, outputs=["x0"])
    assert made.leaves.graph_names() == (["input.x0"], ["returned.x0", "output.x0"])
    ours = args[0].clone()
    (got,) = runner(made, args, args)([ours])
    torch.testing.assert_close(got, ours * 2)
    torch.testing.assert_close(ours, args[0] + 1)


@pytest.mark.parametrize("dims", [(1, 0), (3, 1), (4, 2), (2, -1)], ids=str)
def test_index_copy_along_any_axis(dims: tuple[int, int]) -> None:
    rank, axis = dims
    shape = [2, 3, 4, 2][:rank]
    target, index = torch.randn(shape), torch.randperm(shape[axis])[:2]
    source = torch.randn(shape).index_select(axis, torch.arange(2))

    def function(x: Tensor, at: Tensor, new: Tensor) -> Tensor:
        return x.index_copy(axis, at, new)

    expected = function(target, index, source)
    made = lowered(function, target, index, source, outputs=["y"])
    assert "Transpose" not in {node.op_type for node in made.model.graph}
    (got,) = runner(made, [target, index, source], [expected])([target, index, source])
    assert torch.equal(got, expected)


def _raises(x: Tensor) -> Tensor:
    return x.mul_(2).add_(torch.arange(6))


@pytest.mark.parametrize("function", [_raises, _rolls, _returns_old_and_new])
def test_tensors_that_do_not_lie_in_a_row(function: Callable[..., Any]) -> None:
    """Nothing that was declared, and right all the same."""
    args = [torch.randn(4, 6)]
    whole = torch.randn(6, 8)
    theirs = whole.clone()
    expected = function(theirs.T[2:6])
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    made = lowered(function, *args, outputs=[f"y{index}" for index in range(len(expected))])
    got = runner(made, args, expected)([whole.T[2:6]])
    torch.testing.assert_close(list(got), expected)
    assert torch.equal(whole, theirs)


def test_empty_tensors() -> None:
    args = [torch.zeros(0, 3)]
    run = runner(lowered(_counts, *args, outputs=["y"]), args, args)
    for _ in range(2):
        assert run([torch.zeros(0, 3)])[0].shape == (0, 3)


def test_inference_tensors_and_views() -> None:
    args = [torch.zeros(4)]
    run = runner(lowered(_counts, *args, outputs=["y"]), args, args)
    with torch.inference_mode():
        one = torch.zeros(4)
    run([one])
    whole = torch.zeros(8)
    run([whole[2:6]])
    assert one.tolist() == [1] * 4
    assert whole.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


# ── what may lie in one memory ──────────────────────────────────────────────────────────────────────────────────────


def _graph(text: str) -> ir.Graph:
    return ir.from_onnx_text(f'<ir_version: 9, opset_import: ["" : 20]> g {text}').graph


@pytest.mark.parametrize(
    ("body", "safe"),
    [
        ("y = ScatterND(x, i, u)", True),
        ("y = ScatterND(u, i, x)", False),  # updates are read while others are written
        ("y = ScatterND(x, i, u) z = Neg(x)", False),  # may run after it
        ("n = Neg(x) y = ScatterND(x, i, n)", True),
        ("n = Neg(x) m = Neg(n) y = ScatterND(x, i, m)", True),
        ("y = Add(x, u)", True),
        ("y = Add(u, x)", True),
        ("y = Transpose(x)", False),
        ("y = Neg(u)", True),
        ("y = Neg(u) z = Abs(x)", False),
        ("v = Identity(x) z = Abs(v) y = ScatterND(x, i, u)", False),  # the same memory by another name
        ("v = Identity(x) z = Abs(v) y = ScatterND(x, i, z)", True),
        ("v = Reshape(x, i) w = Squeeze(v) y = Transpose(w)", False),
        ("v = Slice(x, i, i) w = Concat <axis = 0> (v, u) y = Slice(w, i, i)", True),
    ],
)
def test_may_overwrite(body: str, safe: bool) -> None:
    graph = _graph(f"(float[3] x, int64[1,1] i, float[1] u) => (float[3] y) {{ {body} }}")
    assert may_overwrite(graph.outputs[0], graph.inputs[0]) is safe


def test_readers_inside_branches_are_not_overtaken() -> None:
    graph = _graph(
        "(float[3] x, int64[1,1] i, float[1] u, bool c) => (float[3] y, float[3] z) {"
        " z = If (c) <then_branch = a () => (float[3] p) { p = Neg(x) },"
        " else_branch = b () => (float[3] q) { q = Abs(x) }> y = ScatterND(x, i, u) }"
    )
    assert not may_overwrite(graph.outputs[0], graph.inputs[0])


# ── records ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "backend",
    [
        {"passed_through": {"nothing": "x"}},
        {"passed_through": {"y": "nothing"}},
        {"passed_through": {"y": ["x"]}},
        {"passed_through": ["y"]},
    ],
    ids=str,
)
def test_damaged_records(backend: dict[str, Any]) -> None:
    info = TensorInfo("x", "float32", (1,))
    metadata = ExportMetadata(inputs=(info,), outputs=(attrs.evolve(info, name="y"),), backend=backend)
    with pytest.raises(ArtifactError, match="does not fit its inputs and outputs"):
        Leaves.of(metadata)


@pytest.mark.parametrize("in_place", [("nothing",), ("x", "x")], ids=str)
def test_damaged_records_of_changed_inputs(in_place: tuple[str, ...]) -> None:
    info = TensorInfo("x", "float32", (1,))
    metadata = ExportMetadata(inputs=(info,), outputs=(attrs.evolve(info, name="y"),), in_place=in_place)
    with pytest.raises(ArtifactError, match="does not fit its inputs and outputs"):
        Leaves.of(metadata)


def test_record_of_something_else_than_the_graph() -> None:
    made = lowered(torch.neg, torch.zeros(3), outputs=["y"])
    info = TensorInfo("x0", "float32", (3,))
    metadata = ExportMetadata(inputs=(info,), outputs=(attrs.evolve(info, name="y"),), in_place=("x0",))
    with pytest.raises(ArtifactError, match="The graph returns y"):
        SessionRunner(made.model, metadata, RunRequest())
