"""Lowering a traced program to ONNX: the interface of the graph, and the same numbers as eager."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from polyport_dynamo.lowering import preparing
from polyport_onnx.lowering import lower_program
from polyport_onnx.translate import UnsupportedOperator

AUTO = torch.export.Dim.AUTO
BATCH = {0: "batch"}


class Function(nn.Module):
    """A module around a function, which is what torch.export takes."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> object:
        return self.function(*args)


def trace(
    model: nn.Module | Callable[..., object], *args: Tensor, dynamic: Sequence[int] = (0,)
) -> torch.export.ExportedProgram:
    """Export with the same open axes in every argument."""
    module = model if isinstance(model, nn.Module) else Function(model)
    shapes = [{axis: AUTO for axis in dynamic if axis < arg.dim()} for arg in args]
    with torch.no_grad():
        return torch.export.export(
            module.eval(),
            args,
            strict=False,
            dynamic_shapes=(tuple(shapes),) if isinstance(module, Function) else tuple(shapes),
        )


def lower(
    program: torch.export.ExportedProgram, inputs: int = 1, outputs: int = 1, **options: object
) -> ir.Model:
    names = [f"in_{index}" for index in range(inputs)]
    options.setdefault("axes", {})
    return lower_program(
        program,
        input_names=names,
        output_names=[f"out_{index}" for index in range(outputs)],
        **options,  # type: ignore[arg-type]
    ).model


def run(model: ir.Model, *args: Tensor) -> list[np.ndarray]:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = {item.name: arg.numpy() for item, arg in zip(session.get_inputs(), args, strict=True)}
    return session.run(None, feed)


def assert_same(
    function: Callable[..., object] | nn.Module, *samples: Sequence[Tensor], **options: object
) -> ir.Model:
    """Trace at the first sample, and compare with eager at all of them."""
    expected = [function(*[arg.clone() for arg in sample]) for sample in samples]
    as_list = [list(value) if isinstance(value, tuple) else [value] for value in expected]
    program = trace(function, *[arg.clone() for arg in samples[0]])
    model = lower(program, len(samples[0]), len(as_list[0]), **options)
    for sample, wanted in zip(samples, as_list, strict=True):
        for got, want in zip(run(model, *sample), wanted, strict=True):
            assert got.dtype == want.detach().numpy().dtype
            np.testing.assert_allclose(got, want.detach().numpy(), rtol=1e-5, atol=1e-6)
    return model


def op_types(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


# -- interface -----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: Tensor, unused: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids)))


def tied_model(**options: object) -> tuple[Tied, ir.Model]:
    model = Tied()
    program = trace(model, torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 3), dynamic=(0, 1))
    return model, lower_program(
        program, input_names=["input_ids", "unused"], output_names=["logits"],
        axes={"input_ids": {0: "batch", 1: "sequence"}}, **options,  # type: ignore[arg-type]
    ).model  # fmt: skip


def test_names_and_axes_are_the_given_ones_and_unused_inputs_stay() -> None:
    _, model = tied_model()
    assert [value.name for value in model.graph.inputs] == ["input_ids", "unused"]
    assert [value.name for value in model.graph.outputs] == ["logits"]
    assert [str(dim) for dim in model.graph.inputs[0].shape] == ["batch", "sequence"]
    assert [str(dim) for dim in model.graph.inputs[1].shape] == ["unused_axis_0", "unused_axis_1"]
    assert [str(dim) for dim in model.graph.outputs[0].shape] == ["batch", "sequence", "11"]


def test_derived_sizes_are_expressions_of_axis_names() -> None:
    program = trace(lambda x: torch.cat([x, x]), torch.zeros(3, 4))
    model = lower(program, axes={"in_0": BATCH})
    assert [str(dim) for dim in model.graph.outputs[0].shape] == ["2*batch", "4"]


def test_weights_are_shared_with_the_model_and_tied_ones_are_stored_once() -> None:
    source, model = tied_model()
    weights = {name: value for name, value in model.graph.initializers.items() if value.shape == (11, 8)}
    assert len(weights) == 1
    (weight,) = weights.values()
    assert weight.const_value.raw.data_ptr() == source.embed.weight.data_ptr()


def test_the_program_is_not_changed() -> None:
    def function(x: Tensor) -> Tensor:
        y = torch.nn.functional.celu(x) + 1  # No translation: decomposed.
        y[:, 0] = 2
        return y.masked_fill_(x > 1, 3.0)

    program = trace(function, torch.randn(3, 4))
    before, constraints = str(program), dict(program.range_constraints)
    first, second = lower(program), lower(program)
    assert str(program) == before
    assert program.range_constraints == constraints
    assert op_types(first) == op_types(second)


def test_outputs_that_are_inputs_weights_or_each_other_have_nodes_of_their_own() -> None:
    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = x + self.weight
            return x.clone(), self.weight, y, y

    assert_same(Passes(), [torch.randn(2, 3)], [torch.randn(5, 3)])


def test_wrong_names_are_refused() -> None:
    program = trace(torch.relu, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="1 tensor inputs, but 2 names"):
        lower(program, inputs=2)
    with pytest.raises(ValueError, match="inputs are \\['in_0'\\]"):
        lower(program, axes={"ids": BATCH})
    with pytest.raises(ValueError, match="must differ"):
        lower_program(
            trace(torch.add, torch.zeros(2), torch.zeros(2)),
            input_names=["a", "a"],
            output_names=["b"],
            axes={},
        )


@pytest.mark.parametrize("opset", [18, 19, 20, 21, 22, 23])
def test_every_supported_opset_gives_a_valid_model(opset: int) -> None:
    source = nn.Sequential(
        nn.Conv1d(4, 8, 3), nn.GroupNorm(2, 8), nn.GELU(), nn.BatchNorm1d(8), nn.Softplus()
    )
    with torch.no_grad():
        source[3].running_var.uniform_(0.5, 1.5)
    model = assert_same(source.eval(), [torch.randn(2, 4, 9)], [torch.randn(3, 4, 9)], opset_version=opset)
    assert model.opset_imports[""] == opset


def test_other_opsets_are_refused_with_the_range() -> None:
    with pytest.raises(ValueError, match="18 to 23"):
        lower(trace(torch.relu, torch.zeros(2)), opset_version=17)


# -- numbers -------------------------------------------------------------------------------------------------------

PROMOTIONS: Mapping[str, Callable[[Tensor, Tensor], object]] = {
    "float and int tensor": lambda f, i: f * i + i / 2,
    "int and float scalar": lambda f, i: i * 0.5 + f,
    "comparison with a fraction": lambda f, i: (i > 0.5) & (f <= i),
    "booleans in sums": lambda f, i: ((i > 0).sum(-1), (f > 0).cumsum(-1), (i > 0) * f),
    "integer to real function": lambda f, i: (torch.exp(i), i.float().mean(-1), torch.sqrt(i.abs())),
    "size as factor": lambda f, i: f * f.shape[0] + i / i.shape[0],
    "mixed where and cat": lambda f, i: (torch.where(i > 0, f, 0), torch.cat([f, i], 1)),
    "powers": lambda f, i: (f.abs() ** 1.5, i.double() ** 2, 2.0**f),
    "reverse operands": lambda f, i: (1 - i, 2 / (i.abs() + 1), 3.5 - f),
}


@pytest.mark.parametrize("name", PROMOTIONS)
def test_implicit_type_promotion(name: str) -> None:
    samples = [[torch.randn(rows, 3), torch.randint(-3, 4, (rows, 3))] for rows in (4, 2)]
    assert_same(PROMOTIONS[name], *samples)


def _slices(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 0] = 1
    y[1:, 1:3] += x[1:, 1:3]
    return y


def _views_both_ways(x: Tensor) -> tuple[Tensor, ...]:
    base = x.clone()
    flat, turned = base.view(-1), base.transpose(0, 1)
    base.mul_(2)
    flat[0] = 7  # Seen through `turned` and `base`.
    turned.add_(1)  # Seen through `flat`.
    return base, flat, turned


def _copy_does_not_alias(x: Tensor) -> tuple[Tensor, Tensor]:
    base = x * 1
    other = base.t().reshape(-1)  # A copy, since a transpose cannot be flattened in place.
    base.zero_()
    return base, other


def _indexed(x: Tensor) -> Tensor:
    y = x + 0
    y[x > 0] = 5.0
    y.scatter_(1, torch.zeros(x.shape[0], 1, dtype=torch.long), 9.0)
    return y.clamp_(max=6).index_fill_(1, torch.tensor([2]), 3)


def _read_through_parts(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    left, right = y.split([2, 3], 1)
    y.add_(1)
    return left, right, y


def _in_place_keeps_type(x: Tensor) -> Tensor:
    y = x.to(torch.int64)
    y += x > 0
    return y.div_(2, rounding_mode="floor")


@pytest.mark.parametrize(
    "function",
    [_slices, _views_both_ways, _copy_does_not_alias, _indexed, _read_through_parts, _in_place_keeps_type],
)
def test_in_place_operators(function: Callable[[Tensor], object]) -> None:
    assert_same(function, [torch.randn(4, 5)], [torch.randn(6, 5)])


def test_what_cannot_be_followed_locally_takes_the_pass_over_the_whole_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.clone()
        y.split(2, 1)[0].add_(1)  # A view that is not followed.
        return torch.nn.functional.celu(y)

    taken: list[object] = []
    whole = preparing._decompose_whole
    monkeypatch.setattr(preparing, "_decompose_whole", lambda *args: taken.append(args) or whole(*args))
    assert_same(function, [torch.randn(4, 4)])
    assert len(taken) == 1


class Counter(nn.Module):
    def __init__(self, *, matters: bool) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.matters = matters

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x + self.calls if self.matters else x * 2


def test_state_that_results_depend_on_is_refused_and_a_counter_is_dropped() -> None:
    with pytest.raises(ValueError, match="depend on the buffer calls"):
        lower(trace(Counter(matters=True), torch.zeros(2)))
    model = lower(trace(Counter(matters=False), torch.zeros(2)))
    assert not model.graph.initializers.get("calls")


def _mask(rows: int, kind: str) -> Tensor:
    allowed = torch.ones(rows, 1, 4, 4, dtype=torch.bool).tril()
    allowed[-1, :, :2] = False  # Left padding: two queries that may attend to nothing.
    if kind == "bool":
        return allowed
    lowest = -math.inf if kind == "infinite" else torch.finfo(torch.float32).min
    return torch.zeros(allowed.shape).masked_fill(~allowed, lowest)


@pytest.mark.parametrize("kind", ["bool", "infinite", "finite"])
def test_attention_masks_with_rows_that_see_nothing(kind: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, mask)

    samples = [[*torch.randn(3, rows, 2, 4, 8), _mask(rows, kind)] for rows in (2, 3)]
    assert np.isfinite(function(*samples[0]).numpy()).all()
    assert_same(function, *samples)


def test_causal_attention_with_shared_heads_and_a_scale() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)

    assert_same(function, *[
        [torch.randn(rows, 4, 5, 8), torch.randn(rows, 2, 5, 8), torch.randn(rows, 2, 5, 8)] for rows in (2, 3)
    ])  # fmt: skip


def _repeat(x: Tensor, times: int) -> Tensor:
    """As models that share heads write it."""
    batch, heads, length, width = x.shape
    return (
        x[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)
    )


def _repeat_cut(x: Tensor, times: int) -> Tensor:
    """The same, as models write it: each `:` is a cut that takes all of an axis."""
    batch, heads, length, width = x.shape
    return (
        x[:, :, None, :, :]
        .expand(batch, heads, times, length, width)
        .reshape(batch, heads * times, length, width)
    )


@pytest.mark.parametrize("repeat", [_repeat, _repeat_cut])
@pytest.mark.parametrize("masked", [False, True])
def test_heads_that_are_shared_are_not_repeated(
    masked: bool, repeat: Callable[[Tensor, int], Tensor]
) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(
            q, repeat(k, 3), repeat(v, 3), mask if masked else None
        )

    samples = [
        [torch.randn(rows, 6, query, 8), torch.randn(rows, 2, 7, 8), torch.randn(rows, 2, 7, 8),
         torch.rand(rows, 1, query, 7) > 0.3]
        for rows, query in ((2, 4), (3, 4))
    ]  # fmt: skip
    model = assert_same(function, *samples)
    assert "Expand" not in op_types(model)


def test_repetition_that_only_looks_like_sharing() -> None:
    """Heads in another order, and keys repeated in another way than values."""

    def other_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tiled = k[:, None].expand(-1, 2, -1, -1, -1).reshape(k.shape[0], 4, 7, 8)
        return nn.functional.scaled_dot_product_attention(q, tiled, _repeat(v, 2))

    def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, _repeat(k, 2), _repeat(v[:, :1], 4))

    for function in (other_order, one_head):
        assert_same(function, *[
            [torch.randn(rows, 4, 5, 8), torch.randn(rows, 2, 7, 8), torch.randn(rows, 2, 7, 8)] for rows in (2, 3)
        ])  # fmt: skip


def test_reshapes_need_no_shape_arithmetic() -> None:
    def function(x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return x.view(batch, length, 2, width // 2).transpose(1, 2).reshape(batch, 2, -1)

    model = assert_same(function, [torch.randn(2, 3, 8)], [torch.randn(4, 3, 8)])
    assert sorted(set(op_types(model))) == ["Reshape", "Transpose"]


def test_size_arithmetic_rounds_as_python_does() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        pad = -x.shape[0] % 4
        y = nn.functional.pad(x, (0, 0, 0, pad))
        return y.view(-(-x.shape[0] // 4), 4, 3), torch.arange(x.shape[0], 2 * x.shape[0], 2)

    assert_same(function, [torch.randn(6, 3)], [torch.randn(9, 3)], [torch.randn(8, 3)])


@pytest.mark.parametrize(("target", "expected"), [(torch.fft.fft2, "DFT")])
def test_complex_numbers_are_pairs(target: Callable[[Tensor], Tensor], expected: str) -> None:
    model = assert_same(lambda x: target(x).real, [torch.randn(2, 4, 4)], [torch.randn(3, 4, 4)])
    assert expected in op_types(model)


def test_branches_become_if() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))

    program = torch.export.export(Function(function), (torch.ones(2, 3),), strict=False)
    model = lower(program)
    for x in (torch.ones(2, 3), -torch.ones(2, 3)):
        np.testing.assert_allclose(run(model, x)[0], function(x).numpy())


def test_the_work_per_layer_does_not_grow_with_their_number() -> None:
    counts = []
    for layers in (2, 4, 8):
        encoder = nn.Sequential(
            *[nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)) for _ in range(layers)]
        )
        counts.append(len(lower(trace(encoder, torch.randn(2, 3, 4))).graph))
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0])


def test_operators_without_translation_are_listed() -> None:
    with pytest.raises(UnsupportedOperator, match=r"aten\.geqrf"):
        lower(trace(lambda x: torch.geqrf(x)[0], torch.randn(3, 3), dynamic=()))
