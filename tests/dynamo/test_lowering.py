"""What other backends lower a program with: graphs without writes, of operators that they know."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyport_dynamo.lowering import prepare, preparing


class Knows:
    """A backend that has translations for all operators but some."""

    def __init__(self, *unknown: Any) -> None:
        self.unknown = unknown

    def known(self, node: torch.fx.Node) -> bool:
        return node.target not in self.unknown

    def translates(self, target: Any) -> bool:
        return target not in self.unknown


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def traced(function: Callable[[Tensor], Any], x: Tensor, *, read_back: bool) -> Any:
    program = torch.export.export(Function(function), (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    if read_back:
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        program = torch.export.load(file)
    return program


def first_row(x: Tensor) -> Tensor:
    y = x.clone()
    y[0] = 1.0
    return y


def through_a_view(x: Tensor) -> Tensor:
    y = x.clone()
    y.view(-1)[1] = 5.0
    return y


def through_reshapes(x: Tensor) -> Tensor:
    y = x.clone()
    y.reshape(-1).unflatten(0, (-1, 2)).transpose(0, 1)[0].add_(1)
    return y


def of_a_copy(x: Tensor) -> Tensor:
    y = x.clone()
    y.t().reshape(-1)[1] = 5.0  # rows and columns changed places, so this is a copy
    return y


def of_another_type(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.clone()
    z = y.to(torch.float64)
    z.zero_()
    return y, z


def of_the_same_type(x: Tensor) -> Tensor:
    y = x.clone()
    y.to(torch.float32).contiguous().mul_(2)
    return y


@pytest.mark.parametrize("read_back", [False, True], ids=["traced", "read from a file"])
@pytest.mark.parametrize(
    "function", [first_row, through_a_view, through_reshapes, of_a_copy, of_another_type, of_the_same_type]
)
def test_writes_through_views_reach_what_they_are_views_of(
    function: Callable[[Tensor], Any], read_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole(*_: Any) -> Any:
        raise AssertionError("the whole program was decomposed")

    monkeypatch.setattr(preparing, "_decompose_whole", whole)
    program = traced(function, torch.randn(4, 6), read_back=read_back)
    constants = [
        program.constants[spec.target] for spec in program.graph_signature.input_specs if spec.target
    ]
    prepared = prepare(program, Knows())
    calls = [node.target for node in prepared.graph.nodes if node.op == "call_function"]
    assert not any(getattr(target, "_schema", None) and target._schema.is_mutable for target in calls)
    run = torch.fx.GraphModule(nn.Module(), prepared.graph)
    for rows in (4, 8):
        x = torch.randn(rows, 6)
        expected = function(x)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for got, want in zip(run(*constants, x), expected, strict=True):
            torch.testing.assert_close(got, want, atol=0, rtol=0)


def test_only_what_has_no_translation_is_decomposed() -> None:
    program = traced(
        lambda x: (torch.addmm(x, x, x.t() @ x), x.softmax(-1)), torch.randn(4, 4), read_back=False
    )
    prepared = prepare(program, Knows(torch.ops.aten.addmm.default))
    targets = {node.target for node in prepared.graph.nodes if node.op == "call_function"}
    assert torch.ops.aten.addmm.default not in targets
    assert {torch.ops.aten.softmax.int, torch.ops.aten.t.default} <= targets


def test_results_that_depend_on_calls_before_are_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return x + self.count

    with pytest.raises(ValueError, match="the results depend on the buffer count"):
        prepare(torch.export.export(Counts(), (torch.ones(2),)), Knows())
