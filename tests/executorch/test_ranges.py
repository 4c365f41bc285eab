"""What the tracer knows of sizes while a program is lowered, and that other programs don't know it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import sympy
import torch
from several import Several, assert_like_eager, check, images, lower, noise, tokens
from torch.export import Dim
from transformers import DynamicCache

import polyport
from polyport import ExportedModel
from polyport.assembly import Pipeline
from polyport.errors import InputError
from polyport.metadata import AxisRange, ExportMetadata, TensorInfo
from polyport_dynamo import DynamoConfig
from polyport_dynamo.lowering.facts import symbolic
from polyport_executorch import ExecutorchConfig, ExecutorchExporter
from polyport_executorch.ranges import _solved, narrowed


def test_limit_of_two_fixes_nothing(pipeline: Pipeline, small: Any, token_ids: Any) -> None:
    exported = lower(pipeline, max_sizes={"batch": 2, "sequence": 2})
    for shape in ((1, 1), (2, 1), (1, 2), (2, 2)):
        assert_like_eager(small, exported, token_ids(*shape))


def test_limit_of_one(pipeline: Pipeline, small: Any, token_ids: Any) -> None:
    exported = lower(pipeline, max_sizes={"batch": 1})
    for length in (1, 48):
        assert_like_eager(small, exported, token_ids(1, length))


def test_only_an_axis_with_one_size_is_a_number(pipeline: Pipeline) -> None:
    def shapes(exported: ExportedModel) -> dict[str, tuple[Any, ...]]:
        program = exported["model"].program.exported_program()
        return {
            name: tuple(size if isinstance(size, int) else "varies" for size in node.meta["val"].shape)
            for name in program.graph_signature.user_inputs
            for node in program.graph.find_nodes(op="placeholder")
            if node.name == name
        }

    one = lower(pipeline, max_sizes={"batch": 1, "sequence": 6})
    assert set(shapes(one).values()) == {(1, "varies")}
    many = lower(pipeline, max_sizes={"batch": 2, "sequence": 6})
    assert set(shapes(many).values()) == {("varies", "varies")}


def test_a_past_of_one_token_may_be_missing(tiny_llama: Any, token_ids: Any) -> None:
    """What can be nothing or one varies."""
    config = ExecutorchConfig(dynamic=True, max_sizes={"past": 1, "sequence": 4})

    def inputs(past: int, length: int) -> dict[str, Any]:
        cache = DynamicCache(config=tiny_llama.config)
        for layer in range(2):
            cache.update(torch.ones(1, 2, past, 8), torch.ones(1, 2, past, 8), layer)
        return {**token_ids(1, length), "attention_mask": torch.ones(1, past + length, dtype=torch.int64),
                "past_key_values": cache, "use_cache": True}  # fmt: skip

    exported = ExecutorchExporter().export(tiny_llama, inputs(1, 3), config)
    for shape in ((1, 3), (1, 1), (0, 4), (0, 1)):
        with torch.no_grad():
            expected = tiny_llama(**inputs(*shape)).logits
        torch.testing.assert_close(exported(**inputs(*shape)).logits, expected, atol=1e-5, rtol=1e-5)


class _Positions(torch.nn.Module):
    """Only the batch varies: there is one position for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(noise(1, 16, 16, seed=1))
        self.norm = torch.nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm((x + self.table).reshape(-1, 64))


def test_what_torch_decides_by_a_size_is_decided_by_one_within_the_limits() -> None:
    """Here how a convolution is computed: by whether it is of 16 rows or more, which are four images."""
    config = ExecutorchConfig(dynamic=True, max_sizes={"batch": 4})
    given = images((2, 1, 16, 16), (4, 1, 16, 16), (3, 1, 16, 16), (1, 1, 16, 16))
    check(Several(positions=_Positions()), *given, config=config, atol=1e-5, rtol=1e-5)


def _in_chunks(x: torch.Tensor) -> torch.Tensor:
    """As a scan in chunks has it: a length that is no chunk's is padded, and what a chunk has is worked out from how many there are."""
    x = torch.nn.functional.pad(x, (0, 0, 0, (8 - x.size(1) % 8) % 8))
    return x.reshape(x.size(0), x.size(1) // 8, -1, x.size(2)).flatten(1, 2) * 2


def test_a_size_for_whose_limit_torch_finds_none() -> None:
    """Longer than what was traced with: that is what ExecuTorch plans for where there is no limit."""
    config = ExecutorchConfig(dynamic=True, max_sizes={"batch": 4, "sequence": 90})
    given = tokens((2, 21), (4, 90), (3, 17), (1, 9), width=6)
    check(Several(chunks=_in_chunks), *given, config=config, atol=1e-5, rtol=1e-5)


def test_size_that_is_a_multiple() -> None:
    """What limits an axis limits what it is made of."""
    s, t = sympy.symbols("s t", positive=True, integer=True)
    assert list(_solved(s, 64)) == [(s, 64)]
    assert list(_solved(32 * s, 64)) == [(s, 2)]
    assert list(_solved(8 * s + 1, 64)) == [(s, 7)]
    for size in (7, s + t, s * t, s**2, s // 2):
        assert list(_solved(size, 64)) == []


@pytest.mark.parametrize("first", ["executorch", "dynamo"])
def test_other_formats_of_one_trace_are_not_limited(small: Any, token_ids: Any, first: str) -> None:
    calls: list[int] = []
    ours, theirs = (
        ExecutorchConfig(dynamic=True, max_sizes={"batch": 2, "sequence": 6}),
        DynamoConfig(dynamic=True),
    )
    configs = [ours, theirs] if first == "executorch" else [theirs, ours]
    alone = polyport.export(small, token_ids(1, 5), [theirs])["dynamo"]
    handle = small.register_forward_hook(lambda *_: calls.append(1))
    try:
        made = polyport.export(small, token_ids(1, 5), configs)
        together = len(calls)
        calls.clear()
        polyport.export(small, token_ids(1, 5), [theirs])
    finally:
        handle.remove()
    assert together == len(calls)  # traced once
    assert list(made) == [config.export_format for config in configs]
    assert made["dynamo"]["model"].metadata.axes == alone["model"].metadata.axes
    for shape in ((20, 48), (9, 7), (1, 1)):
        assert_like_eager(small, made["dynamo"], token_ids(*shape))
    assert_like_eager(small, made["executorch"], token_ids(2, 6))
    with pytest.raises(InputError, match="'sequence' has size 7, which must be between 1 and 6"):
        made["executorch"](**token_ids(1, 7))


def test_other_formats_of_a_fixed_cache(
    tiny_llama: Any, static_cache: Any, static_step: Any, tmp_path: Path
) -> None:
    """That some of its axes are equal is told to the tracer, which the formats share."""
    configs = [ExecutorchConfig(dynamic=True, max_sizes={"cache_length": 24}), DynamoConfig(dynamic=True)]
    made = polyport.export(tiny_llama, static_step(static_cache(2), 0, 2, 3), configs)["dynamo"]
    made.save_pretrained(tmp_path / "dynamo")
    for exported in (made, ExportedModel.from_pretrained(tmp_path / "dynamo")):
        theirs, ours = static_cache(9), static_cache(9)
        with torch.no_grad():
            expected = tiny_llama(**static_step(theirs, 0, 9, 4))
        got = exported(**static_step(ours, 0, 9, 4))
        torch.testing.assert_close(got.logits, expected.logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.layers[1].values, theirs.layers[1].values, atol=1e-5, rtol=1e-5)


def test_limits_of_one_lowering_do_not_bind_the_next(pipeline: Pipeline, small: Any, token_ids: Any) -> None:
    lower(pipeline, max_sizes={"batch": 3, "sequence": 4})
    again = lower(pipeline)
    assert again["model"].metadata.axes == {"batch": AxisRange(1, 4), "sequence": AxisRange(1, 48)}
    assert_like_eager(small, again, token_ids(4, 48))


class _Times(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum() * y.sum()


def test_what_a_lowering_finds_out_about_sizes_above_the_limits() -> None:
    """It decides by the sizes that were traced with, and a size outside of the limits contradicts whatever it finds out."""
    free = {name: {1: Dim(f"of_{name}", min=1, max=500)} for name in "xy"}
    program = torch.export.export(_Times(), (torch.ones(1, 131), torch.ones(1, 211)), dynamic_shapes=free)
    inputs = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    one, other = (inputs[name].shape[1] for name in "xy")
    env = one.node.shape_env
    before = dict(env.backed_var_to_val)
    info = tuple(TensorInfo(name, "float32", (1, f"of_{name}")) for name in "xy")
    limited = ExportMetadata(axes={f"of_{name}": AxisRange(1, 40) for name in "xy"})
    with narrowed(attrs.evolve(limited, inputs=info), inputs):
        for size in (one, other):
            assert bool(size - 1 > 1)  # so it is 3 or more
            assert 3 <= env.backed_var_to_val[symbolic(size)] <= 40
        assert env.backed_var_to_val[symbolic(one)] != env.backed_var_to_val[symbolic(other)]
    assert env.backed_var_to_val == before
