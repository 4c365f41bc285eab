"""Taking generation apart: the modules that it runs, each with the arguments of a real call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from transformers.cache_utils import Cache

from polyport.capture import untouched
from polyport.capture.prepare import check_model, copied, forward_parameters
from polyport.errors import ExportError, InputError, PolyportError
from polyport.generation import states
from polyport.generation.masks import masks_made
from polyport.generation.stages import DECODE, PREFILL, STAGE, Plan, make_plan
from polyport.generation.steps import merged
from polyport.generation.watching import Call, watched

#: Tokens that the sample generates: a prefill, and two decode steps.
_STEPS = 3


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
    """

    plan: Plan
    parts: Mapping[str, Part]
    multi_token_decode: bool
    static: bool


def decompose_for_generation(
    model: Any,
    inputs: Mapping[str, Any],
    generation_config: Any = None,
    multi_token_decode: bool = False,
) -> dict[str, tuple[torch.nn.Module, dict[str, Any]]]:
    """Take a model's generation apart.

    `model.generate` runs on the sample, and the calls it makes are kept: that needs no knowledge of the model.

    Args:
        model: A `PreTrainedModel` that generates. It comes back unchanged, also after an error.
        inputs: Sample kwargs of `generate` (a prompt, images...); small ones will do.
        generation_config: A `transformers.GenerationConfig`, for a static cache
            (`cache_implementation="static", max_cache_len=...`); the model's own when left out.
        multi_token_decode: Have `decode` take any number of tokens instead of one.

    Returns:
        Component -> (module, its forward kwargs), to act on before each is exported.

    Raises:
        ExportError: The model doesn't generate step by step, or can't take several tokens at once.
        InputError: The model fails on the inputs.
    """
    found = decompose(model, inputs, generation_config, multi_token_decode)
    return {name: (part.module, part.kwargs) for name, part in found.parts.items()}


def component_inputs(
    model: Any,
    samples: Iterable[Mapping[str, Any]],
    generation_config: Any = None,
    multi_token_decode: bool = False,
) -> dict[str, list[dict[str, Any]]]:
    """What each component is called with on several samples: what a quantizer calibrates with.

    Args:
        model: See `decompose_for_generation`.
        samples: Kwargs of `generate`, one dict per sample.
        generation_config: See `decompose_for_generation`.
        multi_token_decode: See `decompose_for_generation`.

    Returns:
        Component -> forward kwargs, one dict per sample in which the component runs.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        for name, part in decompose(model, sample, generation_config, multi_token_decode).parts.items():
            found.setdefault(name, []).append(part.kwargs)
    return found


def decompose(
    model: Any, inputs: Mapping[str, Any], generation_config: Any, multi_token_decode: bool
) -> Decomposition:
    """See `decompose_for_generation`."""
    if not callable(getattr(model, "generate", None)):
        raise ExportError(f"{type(model).__name__} does not generate; export it with export().", stage=STAGE)
    check_model(model)
    with untouched(model), torch.no_grad(), warnings.catch_warnings(), sampled(model):
        warnings.simplefilter("ignore")
        calls = _run(model, inputs, generation_config, lambda _: False)
        inputs = _with_mask(model, inputs)
        plan = make_plan(model, calls, _STEPS)
        keep = {plan.host, *plan.modules.values()}
        calls = _run(model, inputs, generation_config, keep.__contains__)
        if plan.split and not make_plan(model, calls, _STEPS).split:
            plan = make_plan(model, calls, _STEPS)
        return _Assembly(model, plan, calls, multi_token_decode).decomposition()


@contextmanager
def sampled(model: torch.nn.Module) -> Iterator[None]:
    """Have the model make every mask, and keep all tokens in its caches, for the body of a `with`."""
    for module in model.modules():
        if prepare := getattr(module, "_prepare_cache_for_generation", None):
            # `untouched` takes it away again
            vars(module)["_prepare_cache_for_generation"] = states.with_all_tokens(prepare)
    with masks_made(model):
        yield


def _run(
    model: Any, inputs: Mapping[str, Any], generation_config: Any, wanted: Callable[[str], bool]
) -> list[Call]:
    """The outermost calls of one `generate` on the sample."""
    given = {name: copied(value) for name, value in dict(inputs).items() if value is not None}
    options: dict[str, Any] = {
        "max_new_tokens": _STEPS,
        "min_new_tokens": _STEPS,
        "do_sample": False,
        "num_beams": 1,
        "num_return_sequences": 1,
        "use_cache": True,
        "return_dict_in_generate": False,
    }
    if generation_config is not None:
        options["generation_config"] = generation_config
    try:
        with watched(model, wanted) as calls:
            model.generate(**given, **options)
    except PolyportError:
        raise
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} itself fails to generate from these inputs, so there is nothing to export: "
            f"{type(error).__name__}: {error}",
            stage=STAGE,
        ) from error
    return calls


def _with_mask(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The sample with its first token masked: `generate` leaves out a mask of ones, and then its shape can't be known."""
    given = dict(inputs)
    ids = given.get("input_ids")
    mask = given.get("attention_mask")
    takes = "attention_mask" in forward_parameters(model) and not model.config.is_encoder_decoder
    if not takes or not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[1] < 2:
        return given
    mask = torch.ones_like(ids) if mask is None else torch.as_tensor(mask).clone()
    if mask.shape == ids.shape and bool((mask == 1).all()):
        mask[:, 0] = 0
        given["attention_mask"] = mask
    return given


class _Assembly:
    """The parts of one model, from the calls that were watched."""

    def __init__(self, model: Any, plan: Plan, calls: list[Call], multi_token: bool) -> None:
        self.model, self.plan, self.calls, self.multi_token = model, plan, calls, multi_token
        self.steps = [call for call in calls if call.path == plan.host][:_STEPS]
        self.host = self.steps[0].module
        self.cache_name = next(
            (name for name, value in (self.steps[1].kwargs or {}).items() if isinstance(value, Cache)), None
        )

    def decomposition(self) -> Decomposition:
        parts = {name: self.module_part(path) for name, path in self.plan.modules.items()}
        decode = self.step(1)
        cache = decode.get(self.cache_name) if self.cache_name else None
        static = any(hasattr(layer, "max_cache_len") for layer in _layers(cache))
        if self.multi_token:
            decode = self.merged_step(decode)
        if not self.plan.split and not (self.multi_token and self.one_graph(decode, cache)):
            parts[PREFILL] = Part(
                path=self.plan.host, module=self.host, kwargs=self.prefill(cache if static else None)
            )
        tokens = "decoder_sequence" if "decoder_input_ids" in decode else "sequence"
        pinned = frozenset() if self.multi_token else frozenset({tokens})
        parts[DECODE] = Part(path=self.plan.host, module=self.host, kwargs=decode, pinned=pinned)
        return Decomposition(plan=self.plan, parts=parts, multi_token_decode=self.multi_token, static=static)

    def module_part(self, path: str) -> Part:
        for call in self.calls:
            for found in (call, *call.below()):
                if found.path == path and found.kwargs is not None:
                    return Part(path=path, module=found.module, kwargs=_traceable(found.kwargs))
        raise AssertionError(path)  # the plan was made from the same calls

    def step(self, index: int) -> dict[str, Any]:
        kwargs = _traceable(self.steps[index].kwargs or {})
        kept = kwargs.get("logits_to_keep")
        if isinstance(kept, int):
            del kwargs[
                "logits_to_keep"
            ]  # which logits to compute is asked by position, where more than one can be
        return kwargs

    def prefill(self, static_cache: Any) -> dict[str, Any]:
        kwargs = self.step(0)
        if static_cache is not None and self.cache_name:
            kwargs[self.cache_name] = states.emptied(static_cache)
        return self.with_kept(kwargs)

    def with_kept(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """With `logits_to_keep` as positions, where the model takes them so: the last one is what a prompt needs."""
        ids = kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        if "logits_to_keep" not in forward_parameters(self.host) or ids is None or ids.shape[1] < 2:
            return kwargs
        places = torch.arange(ids.shape[1] - 2, ids.shape[1], device=ids.device)
        try:
            every = self.host(**copied_kwargs(kwargs)).logits
            some = self.host(**copied_kwargs(kwargs), logits_to_keep=places).logits
        except Exception:  # noqa: BLE001  a model that only takes a number computes all logits
            return kwargs
        right = some.shape[1] == 2 and torch.allclose(some, every[:, -2:], rtol=1e-3, atol=1e-4)
        return {**kwargs, "logits_to_keep": places} if right else kwargs

    def merged_step(self, first: dict[str, Any]) -> dict[str, Any]:
        """Two decode steps in one, checked against the two."""
        second = self.step(2)
        both = merged(first, second, self.cache_name)
        try:
            once = self.host(**copied_kwargs(both)).logits[:, -1]
        except Exception as error:
            raise self.refused(f"{type(error).__name__}: {error}") from error
        twice = self.host(**copied_kwargs(second)).logits[:, -1]
        if not torch.allclose(once, twice, rtol=1e-3, atol=1e-3 * float(twice.abs().max())):
            raise self.refused(f"the logits differ by {float((once - twice).abs().max()):.2g}")
        return self.with_kept(both)

    def refused(self, reason: str) -> ExportError:
        return ExportError(
            f"{type(self.host).__name__} computes something else when it is given two tokens at once on a filled cache "
            f"({reason}), so its decode step can't take several. Export with multi_token_decode=False.",
            stage=STAGE,
        )

    def one_graph(self, decode: Mapping[str, Any], cache: Any) -> bool:
        """Whether the decode step on an empty cache is a prefill: it takes the same inputs, and only has keys and values."""
        prompt = {name for name, value in self.step(0).items() if isinstance(value, torch.Tensor)}
        outgrown = prompt - {name for name, value in decode.items() if isinstance(value, torch.Tensor)}
        crossed = hasattr(cache, "cross_attention_cache")
        return isinstance(cache, Cache) and not outgrown and not crossed and not states.recurrent(cache)


def copied_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Kwargs of a call of their own: a step writes to its cache."""
    return {name: copied(value) for name, value in kwargs.items()}


def _layers(cache: Any) -> list[Any]:
    return [layer for part in states.parts(cache) for layer in getattr(part, "layers", ())]


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
