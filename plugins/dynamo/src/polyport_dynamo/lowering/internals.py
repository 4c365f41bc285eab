"""What lowering takes from private modules of torch, in one place.

torch has no public way to decompose one operator. A new version that moves these needs a change here and nowhere else.
Tested with torch 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table as _core_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["decomposition_of", "default_decompositions", "is_composite", "run_fake", "trace_fake"]


def decomposition_of(target: Any) -> Callable[..., Any] | None:
    """How torch itself writes `target` in terms of other operators, or None where it does not."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    # torch's composite kernels come first: they end in aten operators, the Python references often in prims.
    if target._can_decompose():
        return target.decompose
    found: Callable[..., Any] | None = _core_decompositions.get(target)
    return found


def is_composite(target: Any) -> bool:
    """Whether an operator is a function of others, as `reshape` is: a view of its input or a copy, as the input requires."""
    return isinstance(target, torch._ops.OpOverload) and bool(target._can_decompose())


def default_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions that `torch.export` uses by default: those which its functionalisation can take."""
    table: dict[Any, Callable[..., Any]] = dict(
        torch.export.default_decompositions().items()  # type: ignore[no-untyped-call]
    )
    return table


def trace_fake(
    function: Callable[..., Any], leaves: Sequence[Any], mode: FakeTensorMode | None
) -> torch.fx.GraphModule:
    """Trace `function` over fake tensors and symbols, leaving their shape environment as it was.

    Args:
        function: takes the leaves as positional arguments.
        leaves: fake tensors and symbolic numbers.
        mode: the fake mode the tensors belong to.
    """
    with contextlib.ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
            stack.enter_context(_frozen(mode))
        stack.enter_context(torch.no_grad())
        return make_fx(function, tracing_mode="real", pre_dispatch=False)(*leaves)


def run_fake(node: torch.fx.Node) -> Any:
    """What a node computes of the tensors that the tracer recorded; the shape environment stays as it was."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    tensors = (arg.meta["val"] for arg in node.all_input_nodes if isinstance(arg.meta["val"], FakeTensor))
    with contextlib.ExitStack() as stack:
        if (first := next(tensors, None)) is not None:
            stack.enter_context(first.fake_mode)
            stack.enter_context(_frozen(first.fake_mode))
        stack.enter_context(torch.no_grad())
        # some kernels that are written in others take the sample's sizes for those of a fake tensor
        stack.enter_context(enable_python_dispatcher())
        return node.target(*args, **kwargs)  # type: ignore[operator]


@contextlib.contextmanager
def _frozen(mode: FakeTensorMode) -> Iterator[None]:
    """Record no guard: the symbols belong to a program which other formats lower later."""
    env = mode.shape_env
    if env is None:
        yield
        return
    with env.suppress_guards():
        yield
