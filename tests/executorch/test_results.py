"""What a program returns and which copies it makes, and sizes that a lowering must not fix."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from several import DYNAMIC, SHAPES, Several, assert_same, check, noise
from several import tokens as tokens_of
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from polyport.errors import ExportError
from polyport_executorch import ExecutorchConfig, ExecutorchExporter, Recipe
from polyport_executorch.lowering import _refuse_fixed

tokens = functools.partial(tokens_of, width=6)


# ── copies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_copies_are_dropped() -> None:
    """Nobody can tell them apart from what they are copies of; a conversion is none."""
    layer = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
    model = Several(
        layer=layer,
        chain=lambda x: (x.clone().detach().to(torch.float32, copy=True) * 2).contiguous() + 1,
        dropped=lambda x: nn.functional.dropout(x * 2, 0.5, training=False) - 1,
        converted=lambda x: x.to(torch.int32).to(torch.float32) * 2,
        rounded=lambda x: x.half().float() + 1,
    )
    _, left = check(model, *tokens(*SHAPES), atol=1e-5, rtol=1e-5)
    assert not any("clone" in name or "dropout" in name for name in left)


def test_new_axes_that_layers_have_in_common() -> None:
    """Each layer of a model adds them to what all take: ExecuTorch would copy it for each, and keep all copies."""

    def layers(x: Tensor) -> Tensor:
        angles = x.sum(-1)
        for scale in (1, 2, 3):
            x = x.cumsum(1) * angles.unsqueeze(-1).cumsum(1) * scale
        return x

    model = Several(
        layers=layers, other=lambda x: x.sum(-1).unsqueeze(-1), same=lambda x: x.sum(-1).unsqueeze(-1)
    )
    _, left = check(model, *tokens(*SHAPES), atol=1e-4, rtol=1e-5)
    assert left["aten::unsqueeze_copy.out"] <= 3  # one for the layers, one for each result


def test_results_that_are_copies_of_an_input() -> None:
    model = Several(
        itself=lambda x: x,
        clone=lambda x: x.clone(),
        twice=lambda x: x.clone().clone(),
        same=lambda x: x.to(torch.float32),
        dropped=lambda x: nn.functional.dropout(x, training=False),
        detached=lambda x: x.detach(),
        viewed=lambda x: x.view(x.shape),
        computed=lambda x: x.clone() + 1,
    )
    sample, *others = tokens(*SHAPES)
    exported = ExecutorchExporter().export(model, sample, DYNAMIC)
    for given in (sample, *others):
        assert_same(exported, model, given, atol=0, rtol=0)
    # a copy is the caller's own, as it is in eager
    x = noise(2, 3, 6)
    got = exported(inputs_embeds=x)
    for name in ("clone", "twice"):
        assert got[name].data_ptr() != x.data_ptr()


def test_results_that_are_conversions_to_the_same_type() -> None:
    model = Several(
        input=lambda x: x.to(torch.float32, copy=True),
        computed=lambda x: (x * 2).to(torch.float32, copy=True),
        sorted=lambda x: x.sort(1).values.to(torch.float32, copy=True),
    )
    check(model, *tokens(*SHAPES), atol=1e-6, rtol=1e-6)


class Results(PreTrainedModel):
    """A layer, and what a function makes of it and of what it computes."""

    config_class = PreTrainedConfig

    def __init__(self, function: Callable[[nn.Linear, Tensor], dict[str, Tensor]]) -> None:
        super().__init__(PreTrainedConfig())
        self.layer, self.function = nn.Linear(6, 6), function
        self.post_init()
        self.eval()

    def forward(self, inputs_embeds: Tensor) -> dict[str, Tensor]:
        return self.function(self.layer, self.layer(inputs_embeds))


@pytest.mark.parametrize(
    "function",
    [
        lambda _, y: {"y": y, "copy": y.clone()},
        lambda _, y: {"copy": y.clone(), "y": y},
        lambda _, y: {
            "y": y,
            "again": y,
            "dropped": nn.functional.dropout(y, training=False).clone(),
            "used": y.clone() + 1,
        },
        lambda _, y: {"a": y.clone(), "b": y.clone(), "twice": y.clone().clone()},
        lambda _, y: {
            "first": y[:, :1],
            "turned": y.transpose(0, 1).contiguous(),
            "copy": y.transpose(0, 1).clone(),
        },
    ],
    ids=["behind", "before", "several", "alone", "views"],
)
def test_results_that_are_copies_of_another(function: Callable[..., dict[str, Tensor]]) -> None:
    check(Results(function), *tokens(*SHAPES), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "function",
    [lambda layer, y: {"y": y, "w": layer.weight.clone()}, lambda layer, y: {"y": y, "w": layer.weight}],
    ids=["copy", "itself"],
)
def test_results_that_are_weights(function: Callable[..., dict[str, Tensor]]) -> None:
    check(Results(function), *tokens(*SHAPES), atol=1e-5, rtol=1e-5)


# ── sizes that a lowering fixes ─────────────────────────────────────────────────────────────────────────────────────


def test_fixed_sizes_are_refused() -> None:
    before = {"ids": 2, "mask": 2, "weight": 0}
    _refuse_fixed(before, before)
    _refuse_fixed(before, {"ids": 2, "added": 0})  # what isn't used any more, and what a pass adds
    with pytest.raises(ExportError, match=r"fixed sizes of ids to those of the sample") as caught:
        _refuse_fixed(before, {"ids": 1, "mask": 2, "weight": 0})
    assert (caught.value.stage, caught.value.backend) == ("lower", "executorch")
    with pytest.raises(ExportError, match=r"fixed sizes of ids, mask to"):
        _refuse_fixed(before, {"ids": 1, "mask": 0, "weight": 0})


def test_pass_that_fixes_a_size(install_recipe: Callable[[str, Any], None]) -> None:
    """A pass of a recipe asks for the number behind a size: the program would be wrong for all others."""
    from executorch.exir.pass_base import ExportPass
    from torch.fx.passes.infra.pass_base import PassResult

    class Fixing(ExportPass):
        def call(self, graph_module: torch.fx.GraphModule) -> PassResult:
            for node in graph_module.graph.find_nodes(op="placeholder"):
                if "inputs_embeds" in node.name:
                    int(node.meta["val"].shape[1])
            return PassResult(graph_module, False)

    install_recipe("acme", Recipe(name="acme", partitioners=list, passes=lambda: [Fixing()]))
    model = Several(layer=nn.Linear(6, 6))
    with pytest.raises(ExportError, match=r"fixed sizes of inputs_embeds to those of the sample"):
        ExecutorchExporter().export(model, *tokens((1, 5)), ExecutorchConfig(dynamic=True, backend="acme"))
