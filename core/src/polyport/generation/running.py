"""Components in the places of a model's modules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils import ModelOutput

from polyport import structure
from polyport.calling import Caller
from polyport.errors import InputError
from polyport.generation import states
from polyport.generation.bridge import Bridge
from polyport.generation.steps import one_token
from polyport.metadata import ExportMetadata
from polyport.structure import TreeSpec

#: Kwargs that only say how to return results, or are settled by the export.
_SETTLED = frozenset({"return_dict", "use_cache", "logits_to_keep"})


class Component:
    """One component, called with what its module takes.

    Args:
        name: Its name.
        metadata: Its record.
        start: Makes it runnable, which is done at its first call: who sends no image needs no image encoder.
    """

    def __init__(self, name: str, metadata: ExportMetadata, start: Callable[[], Caller]) -> None:
        self.name, self.metadata, self._start = name, metadata, start
        names = metadata.input_names
        self.inputs = {leaf.partition(".")[0] for leaf in names}
        self.takes_all_logits = "logits_to_keep" not in names
        self.counts_positions = any(
            info.name == "position_ids" and info.rank == 2 for info in metadata.inputs
        )
        self._bridges: dict[str, Bridge] = {}

    @functools.cached_property
    def caller(self) -> Caller:
        """Its runnable form."""
        return self._start()

    @functools.cached_property
    def device(self) -> torch.device:
        """Where it runs."""
        return torch.device(self.caller.runner.device)

    def __call__(self, kwargs: Mapping[str, Any]) -> Any:
        """Run it.

        Args:
            kwargs: The kwargs of the module's forward. A cache among them is brought up to date, as in eager.

        Returns:
            What the module returns.
        """
        leaves: dict[str, Any] = {}
        cache: Cache | None = None
        cache_name = ""
        for name, value in kwargs.items():
            if isinstance(value, Cache):
                cache, cache_name = value, name
            elif isinstance(value, torch.Tensor):
                leaves[name] = value
            elif value is not None:
                self._nested(name, value, leaves)
        self._refuse_unknown(leaves)
        if cache is not None:
            leaves.update(self._state(cache, cache_name, leaves))
        tensors, sizes = self.caller.run(leaves)
        results = self.caller.results
        if cache is None or results.spec is None or not _is_output(results.spec.type):
            return results.value(tensors, sizes)
        fields = results.parts(results.leaves(tensors, sizes))
        return results.spec.type(
            **{key: self._field(spec, own, cache, cache_name) for key, (spec, own) in fields.items()}
        )

    def forget(self, cache: Any) -> None:
        """Take nothing for known of a cache that starts anew."""
        if isinstance(cache, Cache):
            for bridge in self._bridges.values():
                bridge.forget(cache)

    def _nested(self, name: str, value: Any, leaves: dict[str, Any]) -> None:
        """The tensors inside a container; numbers and flags must be those that were traced."""
        if name in _SETTLED:
            if name == "logits_to_keep" and not self.takes_all_logits:
                leaves[name] = value
            return
        found, spec = structure.flatten(value)
        if spec.is_leaf():
            traced = self.metadata.in_constants.get(name, False)
            if value is not False and value != traced:
                raise InputError(
                    f"The component {self.name!r} was exported with {name}={traced!r} and can't run with {value!r}.",
                    stage="run",
                )
            return
        if any(isinstance(leaf, torch.Tensor) for leaf in found):
            leaves.update(
                (key, leaf) for key, leaf in structure.flatten_named({name: value}) if leaf is not None
            )

    def _refuse_unknown(self, leaves: Mapping[str, Any]) -> None:
        """A tensor that was no input of the trace would be left out without a word; only masks may be.

        A mask that the model was found not to read is no input.
        """
        for leaf in leaves:
            base = leaf.partition(".")[0]
            if base not in self.inputs and not base.endswith("mask"):
                raise InputError(
                    f"The component {self.name!r} was exported without {base!r}. Export from a sample that has it.",
                    stage="run",
                )

    def _state(self, cache: Cache, name: str, leaves: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        if name not in self._bridges:
            self._bridges[name] = Bridge(self.metadata, name)
        bridge = self._bridges[name]
        if not bridge.infos:
            if states.tokens_in(cache):
                raise InputError(
                    f"The component {self.name!r} starts from an empty cache and can't continue a filled one.",
                    stage="run",
                )
            return {}
        rows = next(
            (int(x.shape[0]) for key, x in leaves.items() if key.endswith(("input_ids", "inputs_embeds"))), 1
        )
        return bridge.read(cache, rows, self.device)

    def _field(self, spec: TreeSpec, leaves: list[Any], cache: Cache, cache_name: str) -> Any:
        if spec.is_leaf():
            return leaves[0]
        if spec.type is not None and issubclass(spec.type, Cache):
            return self._bridges[cache_name].write(cache, spec, leaves)
        return structure.unflatten(leaves, spec)


def _is_output(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, ModelOutput)


@attrs.frozen(kw_only=True, eq=False)
class Host:
    """The module that is called once per token: every call is a prefill or a decode step, or several.

    Args:
        prefill: The component for a prompt; None where `decode` or the model's own code does it.
        decode: The component for what follows.
        many: Whether `decode` takes any number of tokens.
        static: Whether the cache has a fixed size.
        own: The model's own forward, which runs a prompt through other components; None where there is a prefill.
        encode: Kwargs -> kwargs with the encoder's results, for models that have an encoder.
    """

    prefill: Component | None
    decode: Component
    many: bool
    static: bool
    own: Callable[..., Any] | None
    encode: Callable[[dict[str, Any]], dict[str, Any]] | None

    def __call__(self, **kwargs: Any) -> Any:
        """Run the step or steps that a call of forward comes to."""
        if self.encode is not None:
            kwargs = self.encode(kwargs)
        cache = kwargs.get("cache")
        state = cache if cache is not None else kwargs.get("state")
        past = states.tokens_in(state)
        ids = next(
            (
                kwargs[key]
                for key in ("decoder_input_ids", "input_ids", "inputs_embeds")
                if kwargs.get(key) is not None
            ),
            None,
        )
        if ids is None:
            raise InputError("Neither input_ids nor inputs_embeds was given.", stage="run")
        count = int(ids.shape[1])
        self._check_cache(cache, past, count)
        if self.decode.counts_positions and kwargs.get("position_ids") is None:
            # what the model itself would count, whatever the mask says
            kwargs["position_ids"] = torch.arange(past, past + count).expand(ids.shape[0], -1)
        if past == 0:
            self.decode.forget(cache)
            if self.prefill is not None:
                self.prefill.forget(cache)
            outputs = self._start(kwargs, count)
            # `generate` would hand over a cache that nobody asked for, with the whole text again
            return _without_state(outputs) if kwargs.get("use_cache") is False else outputs
        if self.many or count == 1:
            return _run(self.decode, kwargs, count)
        return self._token_by_token(kwargs, count, state)

    def _check_cache(self, cache: Any, past: int, count: int) -> None:
        """Refuse a cache of the wrong kind, and tokens that a static one has no room for.

        Raises:
            InputError: A graph would fail somewhere inside, or write tokens over others.
        """
        room = states.room_in(next(states.parts(cache)))
        if self.static and room is None:
            raise InputError(
                "This export was made for a static cache. Pass a StaticCache, or have generate() make one: "
                'cache_implementation="static", and use_cache as it is.',
                stage="run",
            )
        if room is not None and past + count > room:
            raise InputError(
                f"The static cache has room for {room} tokens: {past} are in it, and {count} more don't fit. Generate "
                "less, or with a larger cache (max_cache_len).",
                stage="run",
            )

    def _start(self, kwargs: dict[str, Any], count: int) -> Any:
        if self.prefill is not None:
            return _run(self.prefill, kwargs, count)
        if self.own is not None:
            return self.own(**kwargs)
        if kwargs.get("cache") is None:
            kwargs = {**kwargs, "cache": DynamicCache()}
        return _run(self.decode, kwargs, count)

    def _token_by_token(self, kwargs: dict[str, Any], count: int, state: Any) -> Any:
        growing = states.room_in(state) is None
        name = "cache" if "cache" in kwargs else "state"
        logits: list[torch.Tensor] = []
        outputs: Any = None
        for index in range(count):
            outputs = self.decode(one_token({**kwargs, name: state}, index, count, name, growing))
            state = outputs.get(name, state)
            logits.append(outputs.logits)
        outputs.logits = torch.cat(logits, dim=1)
        return outputs


def _without_state(outputs: Any) -> Any:
    return type(outputs)(**{key: value for key, value in outputs.items() if key not in ("cache", "state")})


def _run(component: Component, kwargs: Mapping[str, Any], count: int) -> Any:
    """One run, with the logits that were asked for."""
    kept = kwargs.get("logits_to_keep")
    if isinstance(kept, int) and not isinstance(kept, bool):
        if not component.takes_all_logits:
            kwargs = {**kwargs, "logits_to_keep": torch.arange(count - kept if kept else 0, count)}
        else:
            outputs = component(kwargs)
            if kept and outputs.logits.shape[1] > kept:
                outputs.logits = outputs.logits[:, -kept:]
            return outputs
    return component(kwargs)


def as_forward(run: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A function in the place of a module's forward: takes positional arguments too, and shows the same signature."""
    signature = inspect.signature(original)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not args:
            return run(**kwargs)
        bound = signature.bind_partial(*args)
        return run(**bound.arguments, **kwargs)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward
