"""The components of a model before their export: each module with the arguments of a real call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from transformers.cache_utils import Cache

from polyport.capture.prepare import copied, forward_parameters
from polyport.errors import ExportError
from polyport.generation import states
from polyport.generation.inside import refuse_state_inside
from polyport.generation.stages import DECODE, PREFILL, STAGE, Plan
from polyport.generation.steps import merged
from polyport.generation.watching import Call

#: Tokens that the sample generates: a prefill, and two decode steps.
STEPS = 3


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """One component before its export.

    Args:
        path: Where its module sits in the model.
        module: The module.
        kwargs: Forward kwargs of a real call.
        pinned: Names of axes that keep the sample's size.
    """

    path: str
    module: torch.nn.Module
    kwargs: dict[str, Any]
    pinned: frozenset[str] = frozenset()


@attrs.frozen(kw_only=True, eq=False)
class Decomposition:
    """A model's generation, taken apart.

    Args:
        plan: Which modules the components are.
        parts: Component -> part, in the order in which they run.
        multi_token_decode: Whether the decode step takes any number of tokens.
        static: Whether its cache has a fixed size.
        growing: Whether its cache grows with every token.
    """

    plan: Plan
    parts: Mapping[str, Part]
    multi_token_decode: bool
    static: bool
    growing: bool


class Assembly:
    """The parts of one model, from the calls that were watched.

    Args:
        model: The model, as it was watched.
        plan: Its components.
        calls: The outermost calls of a `generate`, with the arguments of those that the plan names.
        multi_token: Whether the decode step is to take any number of tokens.
    """

    def __init__(self, model: Any, plan: Plan, calls: list[Call], multi_token: bool) -> None:
        self.model, self.plan, self.calls, self.multi_token = model, plan, calls, multi_token
        self.steps = _steps([call for call in calls if call.path == plan.host])
        self.host = self.steps[0].module
        self.cache_name = next(
            (name for name, value in (self.steps[1].kwargs or {}).items() if isinstance(value, Cache)), None
        )

    def decomposition(self) -> Decomposition:
        """The parts.

        Raises:
            ExportError: The model keeps state inside of its modules, or can't take several tokens at once.
        """
        refuse_state_inside(self.model, self.host, *(call.kwargs or {} for call in self.steps[:2]))
        parts = {name: self._module_part(path) for name, path in self.plan.modules.items()}
        decode = self._step(1)
        cache = decode.get(self.cache_name) if self.cache_name else None
        static = states.room_in(cache) is not None
        if self.multi_token:
            decode = self._merged_step(decode)
        if not self.plan.split and not (self.multi_token and self._one_graph(decode, cache)):
            parts[PREFILL] = Part(
                path=self.plan.host, module=self.host, kwargs=self._prefill(cache if static else None)
            )
        tokens = "decoder_sequence" if "decoder_input_ids" in decode else "sequence"
        pinned = frozenset() if self.multi_token else frozenset({tokens})
        parts[DECODE] = Part(path=self.plan.host, module=self.host, kwargs=decode, pinned=pinned)
        return Decomposition(
            plan=self.plan,
            parts=parts,
            multi_token_decode=self.multi_token,
            static=static,
            growing=not static and any(hasattr(layer, "keys") for layer in states.layers_of(cache)),
        )

    def _module_part(self, path: str) -> Part:
        for call in self.calls:
            for found in (call, *call.below()):
                if found.path == path and found.kwargs is not None:
                    return Part(path=path, module=found.module, kwargs=_traceable(found.kwargs))
        raise AssertionError(path)  # the plan was made from the same calls

    def _step(self, index: int) -> dict[str, Any]:
        kwargs = _traceable(self.steps[index].kwargs or {})
        kept = kwargs.get("logits_to_keep")
        if isinstance(kept, int):
            del kwargs["logits_to_keep"]  # it is asked by position (see `_with_kept`)
        return kwargs

    def _prefill(self, static_cache: Any) -> dict[str, Any]:
        kwargs = self._step(0)
        if static_cache is not None and self.cache_name:
            kwargs[self.cache_name] = states.emptied(static_cache)
        return self._with_kept(kwargs)

    def _with_kept(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """With `logits_to_keep` as positions, where the model takes them so: the last one is what a prompt needs."""
        ids = kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        if "logits_to_keep" not in forward_parameters(self.host) or ids is None:
            return kwargs
        places = torch.tensor([ids.shape[1] - 1], device=ids.device)
        try:
            every = self.host(**copied(kwargs)).logits
            some = self.host(**copied(kwargs), logits_to_keep=places).logits
        except Exception:  # noqa: BLE001  a model that only takes a number computes all logits
            return kwargs
        right = some.shape[1] == 1 and torch.allclose(some, every[:, -1:], rtol=1e-3, atol=1e-4)
        return {**kwargs, "logits_to_keep": places} if right else kwargs

    def _merged_step(self, first: dict[str, Any]) -> dict[str, Any]:
        """Two decode steps in one, checked against the two."""
        second = self._step(2)
        both = merged(first, second, self.cache_name)
        try:
            once = self.host(**copied(both)).logits[:, -1]
        except Exception as error:
            raise self._refused(f"{type(error).__name__}: {error}") from error
        twice = self.host(**copied(second)).logits[:, -1]
        spread = float(
            (twice - twice.mean(-1, keepdim=True)).abs().max()
        )  # what tells one token from another
        if not torch.allclose(once, twice, rtol=0, atol=1e-3 * spread):
            raise self._refused(f"the logits differ by {float((once - twice).abs().max()):.2g}")
        return self._with_kept(both)

    def _refused(self, reason: str) -> ExportError:
        return ExportError(
            f"{type(self.host).__name__} computes something else when it is given two tokens at once on a filled cache "
            f"({reason}), so its decode step can't take several. Export with multi_token_decode=False.",
            stage=STAGE,
        )

    def _one_graph(self, decode: Mapping[str, Any], cache: Any) -> bool:
        """Whether the decode step on an empty cache is a prefill: it takes the same inputs, and only has keys and values."""
        prompt = {name for name, value in self._step(0).items() if isinstance(value, torch.Tensor)}
        outgrown = prompt - {name for name, value in decode.items() if isinstance(value, torch.Tensor)}
        crossed = hasattr(cache, "cross_attention_cache")
        return isinstance(cache, Cache) and not outgrown and not crossed and not states.recurrent(cache)


def _steps(calls: list[Call]) -> list[Call]:
    """A prompt's call and the two after it.

    They need not be the first: Whisper runs a step of its own to find out the language.
    """
    for start in range(len(calls) - STEPS + 1):
        filled = [_continues(call.kwargs or {}) for call in calls[start : start + STEPS]]
        if filled == [False, *[True] * (STEPS - 1)]:
            return calls[start : start + STEPS]
    return calls[:STEPS]


def _continues(kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("state") is not None or states.tokens_in(kwargs.get("cache")) > 0


def _traceable(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call without those that say nothing: what is off, or left out, or about the form of the result."""
    return {
        name: copied(value)
        for name, value in kwargs.items()
        if value is not None
        and value is not False
        and name != "return_dict"
        and not (isinstance(value, dict) and not value)
    }
