"""Recurrences that models unroll over the sequence, as prefix scans of plain tensor operations.

A Python loop over the tokens puts one copy of its body per token of the sample into the graph. The recurrences at hand
are associative, so they can be computed in blocks: scan inside blocks of fixed size by doubling, scan the totals of the
blocks, and carry those into the blocks. Every backend can run that, the cost grows with the length like that of the loop,
and products of decays never leave (0, 1].

Blelloch, "Prefix sums and their applications" (1990), describes the scheme; Gu and Dao, arXiv:2312.00752, section 3.3.2,
that Mamba's recurrence is a scan; De et al., arXiv:2402.19427, the one of RG-LRU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from polyport.patching import Patch, Target
from polyport_dynamo.fixes.scope import uses

Tensors = tuple[torch.Tensor, ...]
Combine = Callable[[Tensors, Tensors], Tensors]

#: Tokens per block. Small, since short inputs are padded to two blocks.
BLOCK = 32

#: Levels of blocks above the first. With two, about 30 * 32 * 32 tokens can be scanned.
LEVELS = 2


def scan(combine: Combine, elements: Tensors, identity: Sequence[float]) -> Tensors:
    """Inclusive prefix scan along axis 1.

    Args:
        combine: Associative: what two neighbouring stretches of the sequence amount to together, elementwise.
        elements: Tensors `[batch, length, ...]`, all of one shape.
        identity: The element that changes nothing, one number per tensor.

    Returns:
        Tensors of the same shape: at every position what everything up to it amounts to.
    """
    return _blocked(combine, elements, identity, LEVELS)


def _blocked(combine: Combine, elements: Tensors, identity: Sequence[float], level: int) -> Tensors:
    length = elements[0].shape[1]
    if level == 0:
        torch._check(length < BLOCK)  # type: ignore[no-untyped-call]
        padded = _padded(elements, identity, BLOCK - length)
        return tuple(x[:, :length] for x in _doubling(combine, padded, identity, 1))
    # one block more than needed: a count that may be 1 would be frozen by the trace
    count = (length + BLOCK - 1) // BLOCK + 1
    blocks = tuple(
        x.reshape(x.shape[0], count, BLOCK, *x.shape[2:])
        for x in _padded(elements, identity, count * BLOCK - length)
    )
    inside = _doubling(combine, blocks, identity, 2)
    totals = _blocked(combine, tuple(x[:, :, -1] for x in inside), identity, level - 1)
    before = tuple(x[:, :count].unsqueeze(2) for x in _padded(totals, identity, 0, front=1))
    return tuple(x.flatten(1, 2)[:, :length] for x in combine(before, inside))


def _doubling(combine: Combine, elements: Tensors, identity: Sequence[float], dim: int) -> Tensors:
    step = 1
    while step < BLOCK:
        shifted = tuple(
            torch.cat(
                [torch.full_like(x.narrow(dim, 0, step), fill), x.narrow(dim, 0, BLOCK - step)], dim=dim
            )
            for x, fill in zip(elements, identity, strict=True)
        )
        elements = combine(shifted, elements)
        step *= 2
    return elements


def _padded(elements: Tensors, identity: Sequence[float], amount: Any, front: int = 0) -> Tensors:
    """The sequences with neutral elements in front and behind."""
    return tuple(
        functional.pad(x, (*([0, 0] * (x.dim() - 2)), front, amount), value=fill)
        for x, fill in zip(elements, identity, strict=True)
    )


def linear(decays: torch.Tensor, inputs: torch.Tensor, start: torch.Tensor | None = None) -> torch.Tensor:
    """All states of `state = decay * state + input`.

    Args:
        decays: `[batch, length, ...]`.
        inputs: Likewise.
        start: State before the first token, `[batch, ...]`; zero if None.

    Returns:
        `[batch, length, ...]`.
    """
    products, states = scan(
        lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1]), (decays, inputs), (1.0, 0.0)
    )
    return states if start is None else states + products * start[:, None]


def _selective_scan(_: Callable[..., Any]) -> Callable[..., Any]:
    def mamba_selective_scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803  called by these names
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        D: torch.Tensor | None = None,  # noqa: N803
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **_: Any,
    ) -> Any:
        step = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
        step = (functional.softplus(step) if delta_softplus else step).transpose(1, 2)[..., None]
        inputs = (
            step * B.transpose(1, 2)[:, :, None].float() * hidden_states.transpose(1, 2)[..., None].float()
        )
        states = linear(torch.exp(A * step), inputs)
        output = torch.matmul(states.to(hidden_states.dtype), C.transpose(1, 2)[..., None])[..., 0].transpose(
            1, 2
        )
        output = output if D is None else output + hidden_states * D[:, None]
        output = output if z is None else output * functional.silu(z)
        return (output, states[:, -1]) if return_last_state else output

    return mamba_selective_scan


def _rnn_scan(found: Callable[..., Any]) -> Callable[..., Any]:
    def rnn_scan(
        self: Any,
        hidden_states: torch.Tensor,
        recurrent_gate: torch.Tensor,
        reset: torch.Tensor,
        recurrent_states: torch.Tensor | None,
        acc_dtype: torch.dtype = torch.float32,
    ) -> Any:
        if hidden_states.shape[1] == 1:
            return found(self, hidden_states, recurrent_gate, reset, recurrent_states, acc_dtype)
        decays = (recurrent_gate * ~reset).to(acc_dtype)
        states = linear(decays, hidden_states.to(acc_dtype), recurrent_states)
        return states.to(hidden_states.dtype), states[:, -1]

    return rnn_scan


def _wkv(_: Callable[..., Any]) -> Callable[..., Any]:
    def rwkv_linear_attention_cpu(
        time_decay: torch.Tensor,
        time_first: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        state: Any = None,
        return_state: bool = False,
    ) -> Any:
        k, v = key.float(), value.float()
        decay = (-torch.exp(time_decay.float())).expand_as(k)
        states = scan(_combine_scaled, (decay, k, v, torch.ones_like(v)), (0.0, -1e38, 0.0, 0.0))
        zero = torch.zeros_like(k[:, 0])
        start = (zero, zero - 1e38, zero, zero) if state is None else (zero, state[2], state[0], state[1])
        first = tuple(x[:, None] for x in start)
        states = _combine_scaled(first, states)
        length = k.shape[1]
        _, scale, numerator, denominator = (
            torch.cat([a, b], 1)[:, :length] for a, b in zip(first, states, strict=True)
        )
        top = torch.maximum(scale, k + time_first)
        old, new = torch.exp(scale - top), torch.exp(k + time_first - top)
        output = ((old * numerator + new * v) / (old * denominator + new)).to(key.dtype)
        if return_state or state is not None:
            state = [states[2][:, -1], states[3][:, -1], states[1][:, -1]]
        return output, state

    return rwkv_linear_attention_cpu


def _combine_scaled(left: Tensors, right: Tensors) -> Tensors:
    """Stretches of RWKV's weighted mean: (decay in all, log scale, numerator, denominator), as in its stable form."""
    moved = left[1] + right[0]
    scale = torch.maximum(moved, right[1])
    old, new = torch.exp(moved - scale), torch.exp(right[1] - scale)
    return left[0] + right[0], scale, old * left[2] + new * right[2], old * left[3] + new * right[3]


def _reproducer(build: Callable[[], torch.nn.Module]) -> Callable[[], None]:
    """Checks that a model traced at one length runs at another."""

    def reproduce() -> None:
        model = build().eval()
        length = torch.export.Dim.AUTO
        with torch.no_grad():
            program = torch.export.export(
                model,
                (),
                {"input_ids": torch.ones(2, 5, dtype=torch.long), "use_cache": False},
                dynamic_shapes={"input_ids": {1: length}, "use_cache": None},
            )
            program.module()(input_ids=torch.ones(2, 40, dtype=torch.long), use_cache=False)

    return reproduce


def _mamba() -> torch.nn.Module:
    from transformers import MambaConfig, MambaModel

    return MambaModel(MambaConfig(vocab_size=8, hidden_size=8, state_size=2, num_hidden_layers=1))


def _gemma() -> torch.nn.Module:
    from transformers import RecurrentGemmaConfig, RecurrentGemmaModel

    return RecurrentGemmaModel(
        RecurrentGemmaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            lru_width=8,
            num_key_value_heads=1,
            block_types=["recurrent"],
        )
    )


def _rwkv() -> torch.nn.Module:
    from transformers import RwkvConfig, RwkvModel

    return RwkvModel(
        RwkvConfig(
            vocab_size=8, hidden_size=8, attention_hidden_size=8, intermediate_size=8, num_hidden_layers=2
        )
    )


def _patch(name: str, target: Target, build: Callable[[], torch.nn.Module], *modules: str) -> Patch:
    return Patch(
        id=f"transformers-recurrence-{name}",
        targets=(target,),
        reason=(
            "The recurrence over the sequence is a Python loop, which a trace unrolls: the graph is for one length only "
            "and grows with it. The replacement computes the same states as a scan in blocks."
        ),
        upstream="unreported",
        affects={"transformers": ">=5.20,<6"},
        reproduce=_reproducer(build),
        applies=uses(*(f"transformers.models.{module}" for module in modules)),
    )


_GEMMA = "recurrent_gemma.modeling_recurrent_gemma"
_RWKV = "rwkv.modeling_rwkv"

PATCHES = (
    _patch(
        "mamba",
        Target("polyport_dynamo.fixes.namespace:modeling.mamba_selective_scan", _selective_scan),
        _mamba,
        "mamba.modeling_mamba",
        "falcon_mamba.modeling_falcon_mamba",
        "jamba.modeling_jamba",
    ),
    _patch(
        "rg-lru",
        Target(f"transformers.models.{_GEMMA}:RecurrentGemmaRglru._rnn_scan", _rnn_scan),
        _gemma,
        _GEMMA,
    ),
    _patch("rwkv", Target(f"transformers.models.{_RWKV}:rwkv_linear_attention_cpu", _wkv), _rwkv, _RWKV),
)
