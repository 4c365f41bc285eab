"""Tensors whose content a runtime keeps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache

from polyport.calling import Caller
from polyport.errors import InputError
from polyport.held import HeldTensor, plain_tensor
from polyport.metadata import ExportMetadata, TensorInfo

CONTENT = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4, 1)


class Keeper:
    """Counts how often it is read."""

    def __init__(self, runner: Any = None) -> None:
        self.runner, self.reads = runner, 0

    def read(self, key: Any) -> torch.Tensor:
        self.reads += 1
        return CONTENT + key


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


def held(keeper: Keeper, key: int = 0) -> HeldTensor:
    return HeldTensor(keeper, key, CONTENT.shape, CONTENT.dtype)


def test_shape_and_dtype_need_no_content(keeper: Keeper) -> None:
    tensor = held(keeper)
    assert isinstance(tensor, torch.Tensor)
    assert (tensor.shape, tensor.shape[-2], tensor.numel(), tensor.dim()) == ((2, 3, 4, 1), 4, 24, 4)
    assert (tensor.dtype, tensor.device.type, tensor.is_contiguous()) == (torch.float32, "cpu", True)
    assert tensor.to("cpu") is tensor
    assert keeper.reads == 0


@pytest.mark.parametrize("inference", [False, True])
def test_rows_are_reordered_without_content(keeper: Keeper, inference: bool) -> None:
    with torch.inference_mode(inference):
        once = held(keeper).index_select(0, torch.tensor([1, 1, 0]))
        twice = once[torch.tensor([2, 0])].detach()
    assert keeper.reads == 0
    assert isinstance(twice, HeldTensor)
    assert twice.shape == (2, 3, 4, 1)
    assert torch.equal(plain_tensor(once), CONTENT[[1, 1, 0]])
    assert torch.equal(plain_tensor(twice), CONTENT[[0, 1]])


def test_reorders_as_a_cache_does(keeper: Keeper) -> None:
    cache = DynamicCache()
    cache.update(CONTENT.clone(), CONTENT.clone(), 0)
    cache.layers[0].keys, cache.layers[0].values = held(keeper), held(keeper, 1)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.get_seq_length() == 4
    assert keeper.reads == 0
    assert torch.equal(plain_tensor(cache.layers[0].values), CONTENT[[1, 0]] + 1)
    cache.crop(-2)
    assert type(cache.layers[0].keys) is torch.Tensor
    assert torch.equal(cache.layers[0].keys, CONTENT[[1, 0]][:, :, :2])


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x[..., :2, :],
        lambda x: x.index_select(1, torch.tensor([0, 2])),
        lambda x: x.repeat_interleave(2, dim=0),
        lambda x: torch.cat([x, x], dim=-2),
        lambda x: x.half(),
        lambda x: torch.zeros(2, 3, 4, 1).copy_(x),
        lambda x: x[:, torch.tensor([0, 1])],
        lambda x: x.clone(),
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: torch.from_numpy(np.asarray(x)),
        lambda x: torch.from_dlpack(x),
        lambda x: torch.tensor(x.tolist()),
        copy.deepcopy,
        lambda x: pickle.loads(pickle.dumps(x)),
    ],
)
def test_everything_else_computes_with_the_content(keeper: Keeper, compute: Any) -> None:
    reordered = held(keeper).index_select(0, torch.tensor([1, 0]))
    got = compute(reordered)
    assert type(got) is torch.Tensor
    assert torch.equal(got, compute(CONTENT[[1, 0]]))
    assert repr(held(keeper)) == repr(CONTENT)


@pytest.mark.parametrize(
    "write",
    [lambda x: x.zero_(), lambda x: x.copy_(CONTENT), lambda x: x.index_fill_(0, torch.tensor([0]), 1.0)],
)
def test_writing_to_it_is_refused(keeper: Keeper, write: Any) -> None:
    with pytest.raises(InputError, match="can't write to it"):
        write(held(keeper))


class Runner:
    """Returns what it is given."""

    device = "cpu"

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self.seen = list(inputs)
        return [tensor.sum() for tensor in inputs]


def test_only_the_runner_that_keeps_a_content_gets_it_held() -> None:
    info = TensorInfo("x", "float32", ("batch", 3, "length", 1))
    metadata = ExportMetadata(inputs=(info,), outputs=(TensorInfo("y", "float32", ()),))
    runner, other = Runner(), Runner()
    tensor = held(Keeper(runner))
    Caller(metadata, runner)({"x": tensor})
    assert runner.seen[0] is tensor
    Caller(metadata, other)({"x": tensor})
    assert type(other.seen[0]) is torch.Tensor
    assert torch.equal(other.seen[0], CONTENT)


def test_the_sizes_of_all_kinds_of_held_tensors_are_known() -> None:
    """A cache of two kinds of layers, whose first tensor does not have the axis that another input's default needs."""
    inputs = (
        TensorInfo("cache.0.state", "float32", ("batch", 3)),
        TensorInfo("cache.1.keys", "float32", ("batch", 3, "past", 1)),
        TensorInfo("mask", "int64", ("batch", "past")),
    )
    outputs = tuple(TensorInfo(f"y{i}", "float32", ()) for i in range(3))
    metadata = ExportMetadata(inputs=inputs, outputs=outputs, defaults={"mask": "ones:batch,past"})
    runner = Runner()
    keeper = Keeper(runner)
    state = HeldTensor(keeper, 0, (2, 3), torch.float32)
    _, sizes = Caller(metadata, runner).run({"cache.0.state": state, "cache.1.keys": held(keeper)})
    assert sizes == {"batch": 2, "past": 4}
    assert runner.seen[2].shape == (2, 4)
