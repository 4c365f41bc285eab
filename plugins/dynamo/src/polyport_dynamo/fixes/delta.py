"""The delta rule of linear attention, which models compute chunk by chunk in a Python loop.

Between chunks the state goes through a matrix per chunk, so joining chunks in a tree, as `recurrence` joins tokens, would cost
far more than the loop. The loop is kept, as torch's `scan`, whose number of steps stays open; within a chunk everything is one
stack of matrix products, as upstream.

Yang et al., "Parallelizing Linear Transformers with the Delta Rule", arXiv:2406.06484, and "Gated Delta Networks",
arXiv:2412.06464, derive the chunked form; the names below are theirs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.scan import scan_op
from torch.nn import functional

from polyport.patching import Patch, Target
from polyport_dynamo.fixes.scope import modules_with

_NAMESPACE = "polyport_dynamo.fixes.namespace:modeling"

#: Tokens per chunk; a power of 2. The result does not depend on it. Small, since short inputs are padded to two chunks.
CHUNK = 32


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    start: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All outputs of `state = exp(decay) * state; state += beta * key x (value - key @ state); output = query @ state`.

    Args:
        query: `[batch, length, heads, keys]`, as are the others in their own sizes.
        key: Likewise.
        value: `[batch, length, heads, values]`.
        decay: At most 0; one number per head, or one per entry of a key.
        beta: How much of a state is overwritten, `[batch, length, heads]`.
        start: State before the first token, `[batch, heads, keys, values]`; zero if None.

    Returns:
        `[batch, length, heads, values]`, and the last state.
    """
    batch, length, heads, width = key.shape
    # one chunk more than needed: a count that may be 1 would be frozen by the trace
    count = (length + CHUNK - 1) // CHUNK + 1
    query, key, value, decay, beta = (_chunks(x, count) for x in (query, key, value, decay, beta[..., None]))
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=key.device).triu(1)
    total = decay.cumsum(3)

    if decay.dim() == 4:  # one decay per head
        between = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
        total = total[..., None]

        def products(left: torch.Tensor) -> torch.Tensor:
            return (left @ key.transpose(-1, -2)) * between
    else:
        gaps = total[..., :, None, :] - total[..., None, :, :]
        between = gaps.masked_fill(later[..., None], float("-inf")).exp()

        def products(left: torch.Tensor) -> torch.Tensor:
            return (left[..., :, None, :] * key[..., None, :, :] * between).sum(-1)

    inverse = _inverse(products(key * beta))
    attention = products(query)
    last = total[..., -1:, :]

    def step(state: torch.Tensor, *chunk: torch.Tensor) -> list[torch.Tensor]:
        written, read, asked, attended, kept, through = chunk
        new = written - read @ state
        return [state * through + kept @ new, asked @ state + attended @ new]

    if start is None:
        start = value.new_zeros(batch, heads, width, value.shape[-1])
    chunked = [
        inverse @ (value * beta),
        inverse @ (key * beta * total.exp()),
        query * total.exp(),
        attention,
        (key * (last - total).exp()).transpose(-1, -2),
        last.exp().transpose(-1, -2),
    ]
    # the operator itself: the function around it would compile the step, and set up torch's compiler for that
    state, output = scan_op(step, [start.to(value)], chunked, ())
    return output.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length], state


def _chunks(x: torch.Tensor, count: Any) -> torch.Tensor:
    """`[batch, length, heads, ...]` as `[count, batch, heads, CHUNK, ...]`, padded with zeros."""
    padded = functional.pad(x, (*([0, 0] * (x.dim() - 2)), 0, count * CHUNK - x.shape[1]))
    chunks = padded.reshape(x.shape[0], count, CHUNK, *x.shape[2:])
    return chunks.permute(1, 0, 3, 2, *range(4, chunks.dim()))


def _inverse(matrix: torch.Tensor) -> torch.Tensor:
    """Inverse of the identity with what a matrix has below its diagonal.

    By blocks, two to one: powers of the matrix would be fewer products, but cancel where keys repeat.
    """
    place = torch.arange(CHUNK, device=matrix.device)
    inverse = torch.eye(CHUNK, dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
    size = 1
    while size < CHUNK:
        block = place // size
        joined = (block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1)
        inverse = inverse - inverse @ matrix.masked_fill(~joined, 0.0) @ inverse
        size *= 2
    return inverse


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _chunked(found: Callable[..., Any]) -> Callable[..., Any]:
    def chunked_delta_rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        chunk_size: int = 64,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not torch.compiler.is_exporting() or isinstance(key.shape[1], int):
            # a loop is as good there, and every backend has it; so it is in strict mode, where every size seems to be one
            return found(  # type: ignore[no-any-return]
                query, key, value, g=g, beta=beta, chunk_size=chunk_size, initial_state=initial_state,
                output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **kwargs,
            )  # fmt: skip
        dtype, groups = query.dtype, value.shape[2] // key.shape[2]
        if groups > 1:
            query, key = (x.repeat_interleave(groups, dim=2) for x in (query, key))
        query, key, value, g, beta = (x.float() for x in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            query, key = _unit(query), _unit(key)
        output, state = delta_rule(query * query.shape[-1] ** -0.5, key, value, g, beta, initial_state)
        return output.to(dtype).contiguous(), state if output_final_state else None

    return chunked_delta_rule


def _reproducer(module: str, name: str, keys: tuple[int, ...]) -> Callable[[], None]:
    """Checks that a rule traced at one length runs at another, and gives what the loop over the chunks gives."""

    def sample(length: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        shapes = (2, length, 2, 4), (2, length, 2, *keys), (2, 2, 4, 4)
        return tuple(torch.rand(shape, generator=generator) for shape in shapes)

    def reproduce() -> None:
        modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")

        class Rule(torch.nn.Module):
            def forward(self, x: torch.Tensor, gate: torch.Tensor, state: torch.Tensor) -> Any:
                return getattr(modeling, name)(
                    x, x.cos(), x, g=-gate, beta=x[..., 0], initial_state=state, output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                )  # fmt: skip

        length = {1: torch.export.Dim.AUTO}
        with torch.no_grad():
            program = torch.export.export(Rule(), sample(5), dynamic_shapes=(length, length, {}))
            for found, wanted in zip(program.module()(*sample(150)), Rule()(*sample(150)), strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)

    return reproduce


PATCHES = tuple(
    Patch(
        id=f"transformers-{slug}",
        targets=(Target(f"{_NAMESPACE}.{name}", _chunked),),
        reason=(
            f"{models} computes linear attention by the delta rule in a Python loop over chunks of 64 tokens, which a trace "
            "unrolls: the graph is for prompts of as many chunks as the sample's only. While exporting, the loop is torch's "
            "scan, with any number of steps."
        ),
        upstream="unreported",
        affects={"transformers": ">=5.20,<6"},
        reproduce=_reproducer(module, name, keys),
        applies=modules_with(name),
    )
    for slug, name, module, keys, models in (
        ("delta-rule", "torch_chunk_gated_delta_rule", "qwen3_next", (), "Qwen3-Next (Qwen3.5, OLMo hybrid)"),
        (
            "delta-rule-by-channel",
            "chunk_kimi_delta_attention",
            "kimi_linear",
            (4,),
            "Kimi Linear (Bailing hybrid, GLM-5)",
        ),
    )
)
