"""Rotary frequencies that change with the length, and are kept in buffers from call to call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from polyport.patching import Patch, Target
from polyport_dynamo.fixes.scope import uses

_TYPES = ("longrope", "dynamic")


class RotaryEmbeddings:
    """All decorated forwards of rotary embeddings as one attribute.

    The decorator that updates the frequencies was applied when the models were defined, transformers' own and others, so a
    patch of it would come too late. Setting `forward` to a function gives every such class what the function makes of
    its forward, and deleting it puts the forwards back.
    """

    def __init__(self) -> None:
        self.__dict__["_found"] = []

    def __getattr__(self, name: str) -> Any:
        if name != "forward":
            raise AttributeError(name)
        return None

    def __setattr__(self, name: str, make: Callable[[Any], Any]) -> None:
        vars(self)[name] = make
        for embedding in _embeddings():
            forward = vars(embedding)["forward"]
            self._found.append((embedding, forward))
            embedding.forward = make(forward)

    def __delattr__(self, name: str) -> None:
        del vars(self)[name]
        while self._found:
            embedding, forward = self._found.pop()
            embedding.forward = forward


#: What the patch refers to, as `polyport_dynamo.fixes.rope:embeddings.forward`.
embeddings = RotaryEmbeddings()


def _embeddings() -> Iterator[type[torch.nn.Module]]:
    """All classes whose own forward is decorated."""
    from transformers.modeling_rope_utils import dynamic_rope_update

    # every decorated function runs the same code
    code = dynamic_rope_update(len).__code__  # type: ignore[no-untyped-call]
    seen: set[type[torch.nn.Module]] = set()
    waiting = [torch.nn.Module]
    while waiting:
        known = waiting.pop()
        if known not in seen:
            seen.add(known)
            waiting.extend(known.__subclasses__())
            if getattr(vars(known).get("forward"), "__code__", None) is code:
                yield known


def _type(module: Any, layer_type: str | None) -> Any:
    return module.rope_type if layer_type is None else module.rope_type[layer_type]


def _without_state(decorated: Callable[..., Any]) -> Callable[..., Any]:
    compute = vars(decorated)["__wrapped__"]

    @functools.wraps(decorated)
    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        kwargs = {} if layer_type is None else {"layer_type": layer_type}
        if _type(self, layer_type) not in _TYPES:
            return decorated(self, x, position_ids, **kwargs)
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        held = self._buffers if name in self._buffers else vars(self)
        kept = held[name]
        # not by the attribute, which would be a change of the model for torch.export
        held[name] = _frequencies(self, position_ids, x.device, layer_type)
        try:
            return compute(self, x, position_ids, **kwargs)
        finally:
            held[name] = kept

    return forward


def _frequencies(
    module: Any, position_ids: torch.Tensor, device: torch.device, layer_type: str | None
) -> torch.Tensor:
    """What a model that was never called before uses for these positions."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, prefix = _type(module, layer_type), "" if layer_type is None else f"{layer_type}_"
    make = functools.partial(ROPE_INIT_FUNCTIONS[kind], module.config, device, layer_type=layer_type)
    original = getattr(module, f"{prefix}original_inv_freq").to(device)
    length = torch.max(position_ids) + 1
    if kind == "dynamic":
        stretched, _ = make(seq_len=length)
        return torch.where(length > module.original_max_seq_len, stretched, original)
    parameters = module.config.rope_parameters
    switch = (parameters if layer_type is None else parameters[layer_type])[
        "original_max_position_embeddings"
    ]
    long = _constant(lambda: make(seq_len=switch + 1)[0])
    # the buffer, into which the frequencies would be copied, may have been cast with the model
    return torch.where(length > switch, long, original).to(getattr(module, f"{prefix}inv_freq").dtype)


def _constant(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A tensor that does not depend on the inputs, as a constant of the graph.

    Powers differ in their last bit from one runtime to another, which counts at position 100,000.
    """
    if torch.compiler.is_dynamo_compiling():
        return compute()  # strict mode reads this very code, and knows no modes
    with _disable_current_modes():
        made = compute()
        values = made.tolist()
    return torch.tensor(values, dtype=made.dtype, device=made.device)


def _phimoe(_: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parameters, scale = self.config.rope_parameters, self.attention_scaling
        if parameters["rope_type"] != "default":
            switch = parameters["original_max_position_embeddings"]
            long, short = (torch.tensor(parameters[f"{kind}_mscale"]) for kind in ("long", "short"))
            scale = torch.where(torch.max(position_ids) + 1 > switch, long, short).to(x.device)
        frequencies = _constant(lambda: self.rope_init_fn(self.config)[0].to(x.device, torch.float32))
        angles = position_ids[..., None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)

    return forward


def _changes(model: Any) -> bool:
    """Whether a model, or one inside it, has frequencies of a kind that changes."""
    if model is None:
        return True
    for part in model.modules():
        kinds = getattr(part, "rope_type", None)
        if any(kind in _TYPES for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])):
            return True
    return False


def _reproduce() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    factors = {"short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    for kind in _TYPES:
        rope = {
            "rope_type": kind,
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 8,
        }
        config = LlamaConfig(
            hidden_size=8,
            num_attention_heads=2,
            max_position_embeddings=8,
            rope_parameters=rope | (factors if kind == "longrope" else {}),
        )
        program = _traced(LlamaRotaryEmbedding(config))
        if changed := program.graph_signature.buffers_to_mutate or [
            node for node in program.graph.nodes if str(node.target) == "aten.copy_.default"
        ]:
            raise AssertionError(f"{kind}: calls depend on earlier ones ({changed})")
        for length in (4, 9, 4, 12):
            x, positions = torch.zeros(1), torch.arange(length)[None]
            torch.testing.assert_close(
                program.module()(x, positions), LlamaRotaryEmbedding(config)(x, positions)
            )


def _reproduce_phimoe() -> None:
    from transformers import PhimoeConfig
    from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 2.0],
        "long_factor": [3.0, 4.0],
        "short_mscale": 1.5,
        "long_mscale": 2.5,
        "original_max_position_embeddings": 8,
    }
    config = PhimoeConfig(
        hidden_size=8, num_attention_heads=2, max_position_embeddings=32, rope_parameters=rope
    )
    program = _traced(PhimoeRotaryEmbedding(config))
    for length in (8, 9):
        x, positions = torch.zeros(1), torch.arange(length)[None]
        torch.testing.assert_close(
            program.module()(x, positions), PhimoeRotaryEmbedding(config)(x, positions)
        )


def _traced(embedding: torch.nn.Module) -> torch.export.ExportedProgram:
    sample = (torch.zeros(1), torch.arange(5)[None])
    shapes = {"x": None, "position_ids": {1: torch.export.Dim.AUTO}}
    with torch.no_grad():
        return torch.export.export(embedding, sample, dynamic_shapes=shapes)


PATCHES = (
    Patch(
        id="transformers-rope-scale",
        targets=(
            Target("transformers.models.phimoe.modeling_phimoe:PhimoeRotaryEmbedding.forward", _phimoe),
        ),
        reason=(
            'PhiMoE chooses one of two scales by the highest position in Python: "could not guard on data-dependent '
            'expression". The graph chooses, by the same condition.'
        ),
        upstream="unreported",
        affects={"transformers": ">=5.20,<6"},
        reproduce=_reproduce_phimoe,
        applies=uses("transformers.models.phimoe.modeling_phimoe"),
    ),
    Patch(
        id="transformers-rope-state",
        targets=(Target("polyport_dynamo.fixes.rope:embeddings.forward", lambda _: _without_state),),
        reason=(
            "Rotary frequencies of the types longrope (Phi-3, Phi-4) and dynamic change with the length, and the "
            "model keeps the last ones in a buffer: a longrope graph writes to it at every call, so that calls depend on "
            "each other and ONNX has no form for it, and a dynamic one can't be traced, since Python decides what to keep. "
            "While tracing, the frequencies follow from the positions of the call alone, as in a model that was never "
            "called before: eager dynamic ones differ from that only where a text is shorter than one before it and "
            "both are longer than the original length."
        ),
        upstream="unreported",
        affects={"transformers": ">=5.20,<6"},
        reproduce=_reproduce,
        applies=_changes,
    ),
)
