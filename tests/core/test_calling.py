from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from polyport import ExportedModel
from polyport.calling import Caller
from polyport.errors import ArtifactError, InputError
from polyport.metadata import AxisRange, AxisSize, ExportMetadata, TensorInfo
from polyport.structure import dump_structure, flatten


class Recorder:
    """A runner that keeps what it got and returns what it is told to."""

    device = "cpu"

    def __init__(self, outputs: Sequence[torch.Tensor] | None = None) -> None:
        self.outputs = outputs
        self.got: list[torch.Tensor] = []

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self.got = list(inputs)
        return self.got if self.outputs is None else self.outputs


def _info(name: str, dtype: str, *shape: AxisSize) -> TensorInfo:
    return TensorInfo(name, dtype, shape)


IDS = _info("input_ids", "int64", "batch", "sequence")
MASK = _info("attention_mask", "int64", "batch", "sequence")
PIXELS = _info("pixel_values", "float32", "batch", 3)
FLAG = _info("flag", "bool")


def _caller(*inputs: TensorInfo, **record: Any) -> tuple[Caller, Recorder]:
    record.setdefault("outputs", inputs)
    runner = Recorder(record.pop("returns", None))
    return Caller(ExportMetadata(inputs=inputs, **record), runner), runner


# ── what is accepted ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([[1, 2]], dtype=torch.int64),
        torch.tensor([[1, 2]], dtype=torch.int32),
        torch.tensor([[1, 2]], dtype=torch.uint8),
        np.array([[1, 2]], dtype=np.int32),
        np.array([[1, 2]], dtype=np.int64),
        [[1, 2]],
        ((1, 2),),
        np.array([[2, 1]])[:, ::-1],
        np.broadcast_to(np.array([1, 2]), (1, 2)),
    ],
    ids=["int64", "int32", "uint8", "numpy-int32", "numpy-int64", "list", "tuple", "reversed", "read-only"],
)
def test_integers(value: Any) -> None:
    caller, runner = _caller(IDS)
    caller({"input_ids": value})
    (got,) = runner.got
    assert got.dtype == torch.int64
    assert got.tolist() == [[1, 2]]
    assert got.is_contiguous()


@pytest.mark.parametrize("mask", [torch.tensor([[True, False]]), np.array([[True, False]]), [[True, False]]])
def test_boolean_masks(mask: Any) -> None:
    caller, runner = _caller(MASK)
    caller({"attention_mask": mask})
    assert runner.got[0].dtype == torch.int64
    assert runner.got[0].tolist() == [[1, 0]]


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(1, 3, dtype=torch.float64),
        torch.ones(1, 3, dtype=torch.float16),
        torch.ones(1, 3, dtype=torch.bfloat16),
        torch.ones(1, 3, dtype=torch.int64),
        np.ones((1, 3)),
        [[1.0, 1, True]],
    ],
)
def test_floats(value: Any) -> None:
    caller, runner = _caller(PIXELS)
    caller({"pixel_values": value})
    assert runner.got[0].dtype == torch.float32
    assert runner.got[0].tolist() == [[1.0, 1.0, 1.0]]


def test_scalars() -> None:
    caller, runner = _caller(FLAG, _info("scale", "float32"))
    caller({"flag": True, "scale": 2})
    assert [(x.dtype, x.shape, x.item()) for x in runner.got] == [
        (torch.bool, torch.Size([]), True),
        (torch.float32, torch.Size([]), 2.0),
    ]
    caller({"flag": np.bool_(False), "scale": np.float64(0.5)})
    assert [x.item() for x in runner.got] == [False, 0.5]


def test_not_contiguous() -> None:
    caller, runner = _caller(PIXELS)
    value = torch.arange(6.0).reshape(3, 2).t()
    caller({"pixel_values": value})
    assert runner.got[0].is_contiguous()
    assert runner.got[0].tolist() == value.tolist()


def test_what_fits_is_not_copied() -> None:
    caller, runner = _caller(PIXELS)
    value = torch.ones(2, 3)
    array = np.ones((2, 3), dtype=np.float32)
    caller({"pixel_values": value})
    assert runner.got[0] is value
    caller({"pixel_values": array})
    assert runner.got[0].data_ptr() == array.ctypes.data


def test_gradients_stay_outside() -> None:
    """A runtime that reads the memory of a tensor refuses one that takes part in a graph of gradients."""
    caller, runner = _caller(PIXELS)
    for value in (torch.ones(1, 3, requires_grad=True), torch.nn.Parameter(torch.ones(1, 3)) * 2):
        caller({"pixel_values": value})
        assert not runner.got[0].requires_grad
        assert type(runner.got[0]) is torch.Tensor


def test_empty_batches_and_lengths() -> None:
    caller, runner = _caller(_info("past", "float32", "batch", "past"))
    caller({"past": torch.ones(2, 0)})
    assert runner.got[0].shape == (2, 0)


def test_inputs_come_in_the_graphs_order() -> None:
    caller, runner = _caller(MASK, IDS)
    caller({"input_ids": [[7, 7]], "attention_mask": [[1, 1]]})
    assert [x.tolist() for x in runner.got] == [[[1, 1]], [[7, 7]]]


def test_a_tokenizers_batch_encoding() -> None:
    from transformers import BatchEncoding

    caller, runner = _caller(IDS)
    caller(BatchEncoding({"input_ids": [[1, 2]]}))
    assert runner.got[0].tolist() == [[1, 2]]


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.filterwarnings("ignore:'ids' is no input")
@pytest.mark.parametrize("kwargs", [{}, {"input_ids": None}, {"ids": [[1]]}])
def test_missing(kwargs: dict[str, Any]) -> None:
    caller, _ = _caller(IDS)
    with pytest.raises(
        InputError, match=r"input 'input_ids' is missing.*takes: input_ids int64\[batch, sequence\]"
    ):
        caller(kwargs)


@pytest.mark.parametrize(
    "value", [[[1.5]], torch.ones(1, 1), np.ones((1, 1)), torch.ones(1, 1, dtype=torch.complex64)]
)
def test_floats_for_integers(value: Any) -> None:
    caller, _ = _caller(IDS)
    with pytest.raises(InputError, match=r"'input_ids' must be int64, not (float|complex)"):
        caller({"input_ids": value})


@pytest.mark.parametrize("value", ["text", [["a"]], [[1], [2, 3]], object(), {"a": 1}, [None]])
def test_no_numbers(value: Any) -> None:
    caller, _ = _caller(IDS)
    with pytest.raises(InputError, match="'input_ids' is no tensor, array or list of numbers"):
        caller({"input_ids": value})


def test_wrong_rank() -> None:
    caller, _ = _caller(IDS)
    with pytest.raises(InputError, match=r"'input_ids' has 1 axes \[3\], not 2"):
        caller({"input_ids": [1, 2, 3]})


def test_wrong_size() -> None:
    caller, _ = _caller(PIXELS)
    with pytest.raises(InputError, match=r"[Aa]xis 1 of 'pixel_values' has size 4, which must be 3"):
        caller({"pixel_values": torch.ones(1, 4)})


def test_shared_axes_must_agree() -> None:
    caller, _ = _caller(IDS, MASK)
    with pytest.raises(
        InputError, match=r"[Aa]xis 1 of 'attention_mask' has size 3, but the axis 'sequence' has size 2"
    ):
        caller({"input_ids": [[1, 2]], "attention_mask": [[1, 1, 1]]})


def test_sums_of_axes() -> None:
    mask = _info("attention_mask", "int64", "batch", "past+sequence")
    caller, _ = _caller(IDS, mask, _info("past", "float32", "batch", "past"))
    caller({"input_ids": [[1, 2]], "attention_mask": [[1] * 5], "past": torch.ones(1, 3)})
    caller({"input_ids": [[1, 2]], "attention_mask": [[1] * 2], "past": torch.ones(1, 0)})
    with pytest.raises(InputError, match=r"axis 'past\+sequence' has size 4, but its parts add up to 5"):
        caller({"input_ids": [[1, 2]], "attention_mask": [[1] * 4], "past": torch.ones(1, 3)})


def test_ranges() -> None:
    caller, _ = _caller(IDS, axes={"batch": AxisRange(1, 8), "sequence": AxisRange(2)})
    caller({"input_ids": torch.ones(8, 2, dtype=torch.int64)})
    with pytest.raises(InputError, match=r"axis 'batch' has size 9, which must be between 1 and 8"):
        caller({"input_ids": torch.ones(9, 2, dtype=torch.int64)})
    with pytest.raises(InputError, match=r"axis 'batch' has size 0, which must be between 1 and 8"):
        caller({"input_ids": torch.ones(0, 2, dtype=torch.int64)})
    with pytest.raises(InputError, match=r"axis 'sequence' has size 1, which must be at least 2"):
        caller({"input_ids": torch.ones(1, 1, dtype=torch.int64)})


# ── kwargs beside the graph's inputs ────────────────────────────────────────────────────────────────────────────────


def test_extra_kwargs_warn_once_where_the_call_is(make_export: Callable[..., ExportedModel]) -> None:
    export = make_export()
    x = torch.ones(1, 3)
    with pytest.warns(UserWarning, match="'labels' is no input of this export and is left out") as caught:
        export(x=x, labels=1)  # this line
    (warning,) = caught
    assert Path(warning.filename) == Path(__file__)
    assert "# this line" in Path(__file__).read_text().splitlines()[warning.lineno - 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(x=x, labels=2)
        export(x=x, return_dict=None)  # None is what leaving it out means


def test_constants() -> None:
    constants = {"use_cache": False, "sizes": [2, 3], "dtype": "torch.float32"}
    caller, runner = _caller(IDS, in_constants=constants)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        caller({"input_ids": [[1]], "use_cache": False, "sizes": (2, 3), "dtype": torch.float32})
        caller({"input_ids": [[1]], "use_cache": None})
    assert len(runner.got) == 1
    for name, value in {"use_cache": True, "sizes": (2, 4), "dtype": torch.float16}.items():
        with pytest.raises(InputError, match=f"'{name}' was traced as the constant"):
            caller({"input_ids": [[1]], name: value})
    with pytest.raises(InputError, match="'sizes' was traced as the constant"):
        caller({"input_ids": [[1]], "sizes": torch.tensor([2, 3])})


@pytest.mark.parametrize(("rule", "value"), [("ones_like:input_ids", 1), ("zeros_like:input_ids", 0)])
def test_defaults(rule: str, value: int) -> None:
    caller, runner = _caller(IDS, MASK, defaults={"attention_mask": rule})
    caller({"input_ids": [[5, 6], [7, 8]]})
    assert runner.got[1].tolist() == [[value, value]] * 2
    assert runner.got[1].dtype == torch.int64
    caller({"input_ids": [[5, 6]], "attention_mask": [[0, 1]]})
    assert runner.got[1].tolist() == [[0, 1]]
    # nothing stays from the call before
    caller({"input_ids": [[5, 6]], "attention_mask": None})
    assert runner.got[1].tolist() == [[value, value]]


def test_defaults_of_what_is_missing_too() -> None:
    caller, _ = _caller(IDS, MASK, defaults={"attention_mask": "ones_like:input_ids"})
    with pytest.raises(InputError, match=r"'input_ids' is missing.*\(may be left out: attention_mask\)"):
        caller({"attention_mask": None})


PAST = _info("cache.keys", "float32", "batch", 2, "past", 4)
STEP_MASK = _info("attention_mask", "int64", "batch", "past+sequence")
STEP_RULE = "ones:batch,past+sequence"


def test_ones_by_the_sizes_of_the_other_inputs() -> None:
    """The mask comes before the inputs that say how long it is."""
    caller, runner = _caller(IDS, STEP_MASK, PAST, defaults={"attention_mask": STEP_RULE})
    for batch, past, new in [(1, 3, 1), (2, 0, 4), (3, 5, 2)]:
        leaves = {"input_ids": torch.zeros(batch, new, dtype=torch.int64)}
        _, sizes = caller.run({**leaves, "cache.keys": torch.zeros(batch, 2, past, 4)})
        assert runner.got[1].tolist() == [[1] * (past + new)] * batch
        assert runner.got[1].dtype == torch.int64
        assert sizes["past+sequence"] == past + new
    # what is given is what counts, and must fit
    leaves = {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "cache.keys": torch.zeros(1, 2, 3, 4)}
    caller.run({**leaves, "attention_mask": torch.tensor([[0, 1, 1, 1]])})
    assert runner.got[1].tolist() == [[0, 1, 1, 1]]
    with pytest.raises(InputError, match=r"'past\+sequence' has size 3, but its parts add up to 4"):
        caller.run({**leaves, "attention_mask": torch.ones(1, 3, dtype=torch.int64)})


def test_ones_of_a_fixed_size() -> None:
    """A static cache: the mask is as long as its buffers."""
    mask = _info("attention_mask", "int64", "batch", 16)
    caller, runner = _caller(IDS, mask, defaults={"attention_mask": "ones:batch,16"})
    caller({"input_ids": [[1], [2]]})
    assert runner.got[1].shape == (2, 16)


def test_counting_by_the_sizes_of_the_other_inputs() -> None:
    places = _info("logits_to_keep", "int64", "kept")
    caller, runner = _caller(IDS, places, defaults={"logits_to_keep": "arange:sequence"})
    caller({"input_ids": [[5, 6, 7]]})
    assert runner.got[1].tolist() == [0, 1, 2]
    assert runner.got[1].dtype == torch.int64
    caller({"input_ids": [[5, 6, 7]], "logits_to_keep": [2]})
    assert runner.got[1].tolist() == [2]
    caller({"input_ids": [[5]]})
    assert runner.got[1].tolist() == [0]


def test_sizes_that_nothing_says() -> None:
    caller, _ = _caller(IDS, STEP_MASK, defaults={"attention_mask": STEP_RULE})
    with pytest.raises(InputError, match="Nothing among the inputs says how long the axis 'past' is"):
        caller({"input_ids": [[1, 2]]})


@pytest.mark.parametrize(
    "rule",
    [
        "eval:input_ids", "ones_like", "ones_like:", "", "ones:", "arange", "arange:",
        "ones:batch,__import__('os')", "ones:batch,past.real", "arange:(lambda: 1)()",
    ],
)  # fmt: skip
def test_unknown_default(rule: str) -> None:
    with pytest.raises(ArtifactError, match=r"by the rule|which is no size"):
        _caller(IDS, MASK, defaults={"attention_mask": rule})


def test_unknown_dtype() -> None:
    with pytest.raises(ArtifactError, match="dtype 'load'"):
        _caller(_info("x", "load", 1))


# ── containers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _cache(layers: int = 2, length: int = 3) -> Any:
    cache = DynamicCache()
    for layer in range(layers):
        cache.update(torch.ones(1, 2, length, 4) + layer, torch.zeros(1, 2, length, 4), layer)
    return cache


def _cache_infos(prefix: str) -> tuple[TensorInfo, ...]:
    return tuple(
        _info(f"{prefix}.layers.{layer}.{name}", "float32", "batch", 2, "past", 4)
        for layer in range(2)
        for name in ("keys", "values")
    )


def test_cache_goes_in_by_leaves() -> None:
    caller, runner = _caller(IDS, *_cache_infos("past_key_values"))
    cache = _cache()
    caller({"input_ids": [[1]], "past_key_values": cache})
    assert runner.got[1] is cache.layers[0].keys
    assert runner.got[4] is cache.layers[1].values


def test_cache_with_too_few_layers() -> None:
    caller, _ = _caller(IDS, *_cache_infos("past_key_values"))
    with pytest.raises(InputError, match=r"'past_key_values\.layers\.1\.keys' is missing"):
        caller({"input_ids": [[1]], "past_key_values": _cache(1)})
    with pytest.raises(InputError, match=r"'past_key_values\.layers\.0\.keys' is missing"):
        caller({"input_ids": [[1]]})


def test_cache_with_too_many_layers() -> None:
    caller, _ = _caller(IDS, *_cache_infos("past_key_values"))
    with pytest.raises(InputError, match=r"'past_key_values\.layers\.2\.keys' is no input"):
        caller({"input_ids": [[1]], "past_key_values": _cache(3)})


def test_containers_are_left_alone() -> None:
    caller, _ = _caller(_info("images.0", "float32", 2), _info("images.1", "float32", 2))
    images = [torch.ones(2), [1, 2]]
    caller({"images": [images[0], np.ones(2)]})
    assert images[1] == [1, 2]


def test_output_class_and_nesting() -> None:
    output = CausalLMOutputWithPast(logits=torch.ones(1), past_key_values=_cache())
    leaves, spec = flatten(output)
    outputs = (_info("logits", "float32", 1), *_cache_infos("past_key_values"))
    caller, _ = _caller(IDS, outputs=outputs, out_spec=dump_structure(spec), returns=leaves)
    got = caller({"input_ids": [[1]]})
    assert type(got) is CausalLMOutputWithPast
    assert got.logits is leaves[0]
    assert isinstance(got.past_key_values, DynamicCache)
    assert got.past_key_values.layers[1].values is leaves[4]
    assert got.loss is None


def test_flat_output() -> None:
    leaves, spec = flatten(BaseModelOutput(last_hidden_state=torch.ones(1)))
    info = _info("last_hidden_state", "float32", 1)
    caller, _ = _caller(IDS, outputs=(info,), out_spec=dump_structure(spec), returns=leaves)
    got = caller({"input_ids": [[1]]})
    assert type(got) is BaseModelOutput
    assert got[0] is leaves[0]


@pytest.mark.parametrize(
    "value",
    [
        {"a": torch.ones(1)},
        (torch.ones(1), torch.ones(2)),
        [torch.ones(1)],
        torch.ones(1),
        {3: torch.ones(1)},
    ],
)
def test_plain_containers_come_out(value: Any) -> None:
    leaves, spec = flatten(value)
    outputs = tuple(_info(f"y{index}", "float32", 1) for index in range(len(leaves)))
    caller, _ = _caller(IDS, outputs=outputs, out_spec=dump_structure(spec), returns=leaves)
    got = caller({"input_ids": [[1]]})
    assert type(got) is type(value)
    assert flatten(got)[1] == spec


def test_constant_outputs() -> None:
    _, spec = flatten({"a": 1, "b": torch.ones(1), "c": "text"})
    tensor = torch.ones(1)
    caller, _ = _caller(
        IDS,
        outputs=(_info("b", "float32", 1),),
        out_spec=dump_structure(spec),
        out_constants=[[0, 1], [2, "text"]],
        returns=[tensor],
    )
    assert caller({"input_ids": [[1]]}) == {"a": 1, "b": tensor, "c": "text"}


@pytest.mark.parametrize("constants", [[[5, "x"]], [[0, 1], [1, 2]], [["a", 1]], [[-1, 1]]])
def test_constant_outputs_that_do_not_fit(constants: list[Any]) -> None:
    _, spec = flatten({"a": 1, "b": torch.ones(1)})
    with pytest.raises(ArtifactError):
        _caller(
            IDS, outputs=(_info("b", "float32", 1),), out_spec=dump_structure(spec), out_constants=constants
        )


def test_no_record_of_the_output() -> None:
    caller, _ = _caller(IDS)
    assert caller({"input_ids": [[1]]})["input_ids"].tolist() == [[1]]


def test_threads_share_a_caller() -> None:
    from concurrent.futures import ThreadPoolExecutor

    leaves, spec = flatten({"y": torch.ones(1)})
    metadata = ExportMetadata(
        inputs=(PIXELS,), outputs=(_info("y", "float32"),), out_spec=dump_structure(spec)
    )

    class Double:
        device = "cpu"

        def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return [inputs[0] * 2]

    caller = Caller(metadata, Double())

    def run(number: int) -> bool:
        value = np.full((number % 5 + 1, 3), number)
        return bool((caller({"pixel_values": value})["y"] == 2 * number).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(200)))
    assert leaves


def test_one_call_costs_little() -> None:
    """No look at the clock: per input, the checks take a fixed number of Python calls."""
    import sys

    caller, _ = _caller(IDS, MASK)
    kwargs = {
        "input_ids": torch.ones(2, 3, dtype=torch.int64),
        "attention_mask": torch.ones(2, 3, dtype=torch.int64),
    }
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    caller(kwargs)
    sys.setprofile(count)
    try:
        caller(kwargs)
    finally:
        sys.setprofile(None)
    assert calls < 20
