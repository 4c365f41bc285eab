"""The largest sizes of axes: where they come from, what they cost, and whom they bind."""

from __future__ import annotations

import copy
from typing import Any

import attrs
import pytest
import torch
from several import assert_like_eager, lower
from torch.export import Dim

from polyport import ExportedModel
from polyport.assembly import Pipeline
from polyport.errors import ConfigError, ExportError, InputError
from polyport.metadata import AxisRange, ExportMetadata
from polyport.pipeline import ExportedComponent
from polyport_executorch import ExecutorchConfig, ExecutorchExporter
from polyport_executorch.bounds import bounded, chosen_limits, total


def record(**axes: AxisRange) -> ExportMetadata:
    return ExportMetadata(axes=axes)


@pytest.fixture(scope="module")
def by_default(pipeline: Pipeline) -> ExportedModel:
    return lower(pipeline)


@pytest.fixture(scope="module")
def narrow(pipeline: Pipeline) -> ExportedModel:
    """Narrower than the sample."""
    return lower(pipeline, max_sizes={"batch": 3, "sequence": 4})


@pytest.fixture(scope="module")
def wide(pipeline: Pipeline) -> ExportedModel:
    return lower(pipeline, max_sizes={"batch": 20})


def planned(exported: ExportedComponent) -> int:
    """Bytes of the plan's memory."""
    (plan,) = exported.program.executorch_program.execution_plan
    return sum(plan.non_const_buffer_sizes)


# ── defaults ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "size", "limit", "expected"),
    [
        ("batch", 1, None, 4),
        ("batch", 5, None, 10),  # twice the sample's
        ("batch", 1, 3, 3),  # the model's own
        ("batch", 1, 100, 4),
        ("sequence", 5, None, 512),
        ("sequence", 5, 48, 48),
        ("sequence", 5, 4096, 512),
        ("sequence", 700, 4096, 1400),
        ("sequence", 700, 1000, 1000),
        ("past", 0, None, 512),
        ("past", 300, None, 600),
        ("past", 3, 100, 100),
        ("height", 24, None, 64),
        ("height", 224, None, 448),
        ("height", 224, 256, 256),
        ("decoder_sequence", 4, 30, 30),
        ("cache_length", 24, None, 64),
        ("cache_length", 100, None, 200),
        ("cache_length", 100, 150, 150),
    ],
)
def test_defaults(name: str, size: int, limit: int | None, expected: int) -> None:
    made = bounded(record(**{name: AxisRange(1, limit)}), {name: size}, {})
    assert made.axes == {name: AxisRange(1, expected)}


def test_limits_that_the_user_has_chosen() -> None:
    shapes = {
        "ids": {0: Dim("batch", max=6), 1: Dim("sequence", min=2)},
        "more": [{0: Dim("rows", max=900)}, None],
    }
    assert chosen_limits(shapes) == {6, 900}
    assert chosen_limits(None) == frozenset()
    axes = {"batch": AxisRange(1, 6), "sequence": AxisRange(2, 4096), "rows": AxisRange(1, 900)}
    made = bounded(record(**axes), {}, {"rows": 7}, {6, 900})
    assert {name: span.max for name, span in made.axes.items()} == {"batch": 6, "sequence": 512, "rows": 7}


def test_sizes_below_the_smallest_are_no_default() -> None:
    made = bounded(record(height=AxisRange(600, None), sequence=AxisRange(600, None)), {}, {})
    assert made.axes == {"height": AxisRange(600, 600), "sequence": AxisRange(600, 600)}


def test_what_a_call_does_not_size_has_a_default() -> None:
    made = bounded(record(batch=AxisRange(), images=AxisRange(0)), {}, {})
    assert made.axes == {"batch": AxisRange(1, 4), "images": AxisRange(0, 64)}


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_on_a_cache_has_room_for_the_rows_of_the_sample(rows: int) -> None:
    """Each row takes the memory of the longest cache, and each token whose logits are returned that of the vocabulary."""
    axes = {"batch": AxisRange(), "past": AxisRange(0), "kept": AxisRange()}
    made = bounded(record(**axes), {"batch": rows, "past": 7, "kept": 1}, {})
    assert made.axes == {"batch": AxisRange(1, rows), "past": AxisRange(0, 512), "kept": AxisRange(1, 16)}


def test_max_sizes_raises_and_lowers() -> None:
    axes = {"batch": AxisRange(), "sequence": AxisRange(1, 2048), "height": AxisRange()}
    made = bounded(record(**axes), {"batch": 6, "sequence": 9}, {"sequence": 2048, "batch": 1})
    assert made.axes == {
        "batch": AxisRange(1, 1),
        "sequence": AxisRange(1, 2048),
        "height": AxisRange(1, 64),
    }


# ── of exports ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_recorded(by_default: ExportedModel, narrow: ExportedModel, wide: ExportedModel) -> None:
    def axes(exported: ExportedModel) -> dict[str, tuple[int, int | None]]:
        return {name: (span.min, span.max) for name, span in exported["model"].metadata.axes.items()}

    assert axes(by_default) == {"batch": (1, 4), "sequence": (1, 48)}  # the model has 48 positions
    assert axes(narrow) == {"batch": (1, 3), "sequence": (1, 4)}
    assert axes(wide) == {"batch": (1, 20), "sequence": (1, 48)}


def test_memory_is_planned_for_the_largest_sizes(
    by_default: ExportedModel, narrow: ExportedModel, wide: ExportedModel
) -> None:
    sizes = [planned(exported["model"]) for exported in (narrow, by_default, wide)]
    assert sizes[0] < sizes[1] / 10
    assert sizes[2] > 2 * sizes[1]


@pytest.mark.parametrize("shape", [(4, 48), (4, 1), (1, 48), (1, 1), (3, 17)])
def test_up_to_the_largest(
    by_default: ExportedModel, small: Any, token_ids: Any, shape: tuple[int, int]
) -> None:
    assert_like_eager(small, by_default, token_ids(*shape))


@pytest.mark.parametrize("shape", [(3, 4), (1, 1), (2, 3)])
def test_up_to_smaller_ones(
    narrow: ExportedModel, small: Any, token_ids: Any, shape: tuple[int, int]
) -> None:
    assert_like_eager(small, narrow, token_ids(*shape))


def test_up_to_larger_ones(wide: ExportedModel, small: Any, token_ids: Any) -> None:
    assert_like_eager(small, wide, token_ids(20, 48))


@pytest.mark.parametrize("rows", [1, 2])
def test_memory_for_one_or_two_rows_is_no_more_than_that(
    pipeline: Pipeline, by_default: ExportedModel, small: Any, token_ids: Any, rows: int
) -> None:
    """Torch takes sizes that vary to be able to be larger."""
    few = lower(pipeline, max_sizes={"batch": rows})
    assert planned(few["model"]) < 1.1 * planned(by_default["model"]) * rows / 4
    for shape in ((1, 48), (rows, 3), (1, 1)):
        assert_like_eager(small, few, token_ids(*shape))


def test_a_larger_input_is_refused(by_default: ExportedModel, narrow: ExportedModel, token_ids: Any) -> None:
    with pytest.raises(InputError, match="The axis 'sequence' has size 49, which must be between 1 and 48"):
        by_default(**token_ids(1, 49))
    with pytest.raises(InputError, match="The axis 'batch' has size 5, which must be between 1 and 4"):
        by_default(**token_ids(5, 5))
    with pytest.raises(InputError, match="The axis 'sequence' has size 5, which must be between 1 and 4"):
        narrow(**token_ids(1, 5))


def test_refused_after_loading(narrow: ExportedModel, small: Any, token_ids: Any, tmp_path: Any) -> None:
    narrow.save_pretrained(tmp_path / "out")
    loaded = ExportedModel.from_pretrained(tmp_path / "out")
    with pytest.raises(InputError, match="The axis 'batch' has size 4, which must be between 1 and 3"):
        loaded(**token_ids(4, 4))
    assert_like_eager(small, loaded, token_ids(3, 4))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"sequense": 9},
            r"'sequense', which is no axis .* Axes: batch, sequence\. Did you mean 'sequence'\?",
        ),
        ({"batch": 2, "pixels": 9}, r"'pixels', which is no axis of this graph\. Axes: batch, sequence\.$"),
        ({"sequence": 49}, r"sequence=49; the traced model allows between 1 and 48"),
    ],
)
def test_sizes_that_a_graph_does_not_have(pipeline: Pipeline, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lower(pipeline, max_sizes=sizes)


def test_size_below_the_smallest() -> None:
    with pytest.raises(ConfigError, match=r"past=1; the traced model allows at least 2\."):
        bounded(record(past=AxisRange(2)), {}, {"past": 1})


def test_graph_without_axes(small: Any, token_ids: Any) -> None:
    with pytest.raises(ConfigError, match=r"'batch', which is no axis of this graph\. Axes: none\."):
        ExecutorchExporter().export(small, token_ids(2, 5), ExecutorchConfig(max_sizes={"batch": 4}))


def test_fixed_sizes(small: Any, token_ids: Any) -> None:
    exported = ExecutorchExporter().export(small, token_ids(2, 5))
    assert exported["model"].metadata.axes == {}
    inputs = token_ids(2, 5)
    inputs["attention_mask"][0, :2] = 0
    assert_like_eager(small, exported, inputs)
    with pytest.raises(InputError, match="Axis 0 of 'input_ids' has size 3, which must be 2"):
        exported(**token_ids(3, 5))


def test_limits_of_dynamic_shapes(small: Any, token_ids: Any) -> None:
    """They stay, though by default there would be less room."""
    batch, length = Dim("batch", min=1, max=6), Dim("sequence", min=2, max=20)
    shapes = {name: {0: batch, 1: length} for name in ("input_ids", "attention_mask")}
    exported = ExecutorchExporter().export(small, token_ids(2, 5), ExecutorchConfig(dynamic_shapes=shapes))
    axes = exported["model"].metadata.axes
    assert axes["batch"].max == 6
    assert axes["sequence"] == AxisRange(2, 20)
    assert_like_eager(small, exported, token_ids(6, 20))
    assert_like_eager(small, exported, token_ids(1, 2))
    with pytest.raises(InputError, match="'sequence' has size 21, which must be between 2 and 20"):
        exported(**token_ids(1, 21))


def test_cache_that_grows(tiny_llama: Any, token_ids: Any) -> None:
    """The mask covers the past and what is new, so its limit is that of both."""
    with torch.no_grad():
        cache = tiny_llama(**token_ids(1, 6), use_cache=True).past_key_values

    def inputs(batch: int, past: int, length: int) -> dict[str, Any]:
        with torch.no_grad():
            grown = tiny_llama(**token_ids(batch, past), use_cache=True).past_key_values
        return {**token_ids(batch, length), "attention_mask": torch.ones(batch, past + length, dtype=torch.int64),
                "past_key_values": grown, "use_cache": True}  # fmt: skip

    sample = {**inputs(1, 6, 3), "past_key_values": cache}
    config = ExecutorchConfig(dynamic=True, max_sizes={"past": 12, "sequence": 7, "batch": 3})
    exported = ExecutorchExporter().export(tiny_llama, sample, config)
    axes = exported["model"].metadata.axes
    assert (axes["past"].max, axes["sequence"].max, axes["batch"].max) == (12, 7, 3)
    for shape in ((1, 6, 3), (2, 12, 7), (3, 1, 1)):
        given = inputs(*shape)
        with torch.no_grad():
            expected = tiny_llama(**copy.deepcopy(given))
        got = exported(**given)
        torch.testing.assert_close(got.logits, expected.logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            got.past_key_values.layers[1].values,
            expected.past_key_values.layers[1].values,
            atol=1e-5,
            rtol=1e-5,
        )
    with pytest.raises(InputError, match="'past' has size 13, which must be between 0 and 12"):
        exported(**inputs(1, 13, 3))


def test_fixed_cache(tiny_llama: Any, static_cache: Any, static_step: Any) -> None:
    """Two buffers that were traced longer than their limit, and turn out to be equally long."""
    config = ExecutorchConfig(dynamic=True, max_sizes={"cache_length": 24, "sequence": 5, "batch": 3})
    sample = static_step(static_cache(2), 0, 2, 3)
    limited = ExecutorchExporter().export(tiny_llama, sample, config)
    default = ExecutorchExporter().export(tiny_llama, sample, ExecutorchConfig(dynamic=True))
    assert planned(limited["model"]) < planned(default["model"]) / 10
    for exported, most in ((limited, 24), (default, 64)):
        assert exported["model"].metadata.axes["cache_length"] == AxisRange(1, most)
        theirs, ours = static_cache(3), static_cache(3)
        for past, query in ((0, 5), (5, 1)):
            with torch.no_grad():
                expected = tiny_llama(**static_step(theirs, past, 3, query))
            got = exported(**static_step(ours, past, 3, query))
            torch.testing.assert_close(got.logits, expected.logits, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(ours.layers[1].keys, theirs.layers[1].keys, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "most"), [("past+sequence", 30), ("past+1", 21), ("past+kept", None), ("7", 7)]
)
def test_axes_that_add_up(name: str, most: int | None) -> None:
    axes = {"past": AxisRange(0, 20), "sequence": AxisRange(1, 10), "kept": AxisRange()}
    assert total(record(**axes), name) == most


def test_one_config_for_the_components_of_a_generation(tiny_llama: Any, token_ids: Any) -> None:
    """The prefill has no past, and the step has no sequence."""
    config = ExecutorchConfig(dynamic=True, max_sizes={"batch": 2, "past": 20, "sequence": 10})
    exported = ExecutorchExporter().export_for_generation(tiny_llama, token_ids(1, 5), config)
    most = {
        name: {axis: span.max for axis, span in part.metadata.axes.items()}
        for name, part in exported.components.items()
    }
    assert most == {"prefill": {"batch": 2, "sequence": 10, "kept": 16}, "decode": {"batch": 2, "past": 20}}
    options: dict[str, Any] = {
        "max_new_tokens": 4,
        "min_new_tokens": 4,
        "do_sample": False,
        "pad_token_id": 0,
    }
    with torch.no_grad():
        expected = tiny_llama.generate(**token_ids(2, 10), **options)
    assert torch.equal(exported.generate(**token_ids(2, 10), **options), expected)
    with pytest.raises(ExportError, match="'sequense', which is no axis"):
        ExecutorchExporter().export_for_generation(
            tiny_llama, token_ids(1, 5), attrs.evolve(config, max_sizes={"sequense": 10})
        )
