"""Taking generation apart: the modules that it runs, each with the arguments of a real call."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from polyport.capture import untouched
from polyport.capture.prepare import check_model, copied, forward_parameters
from polyport.capture.probe import quiet
from polyport.errors import ExportError, InputError, PolyportError
from polyport.generation import states
from polyport.generation.masks import masks_made
from polyport.generation.parts import STEPS, Assembly, Decomposition
from polyport.generation.stages import STAGE, make_plan
from polyport.generation.watching import Call, watched


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
        plan = make_plan(model, calls, STEPS)
        keep = {plan.host, *plan.modules.values()}
        calls = _run(model, _with_mask(model, inputs), generation_config, keep.__contains__)
        return Assembly(model, plan, calls, multi_token_decode).decomposition()


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
        "max_new_tokens": STEPS,
        "min_new_tokens": STEPS,
        "max_length": None,
        "do_sample": False,
        "num_beams": 1,
        "num_return_sequences": 1,
        "use_cache": True,
        "return_dict_in_generate": False,
    }
    config = whole_config(model, generation_config)
    if config is not None:
        config.update(**options)
        options = {"generation_config": config}
    try:
        with untouched(model), quiet(), watched(model, wanted) as calls:
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


def whole_config(model: Any, given: Any) -> Any:
    """A generation config of its own: the model's, with what the given one sets.

    Args:
        model: The model.
        given: A `GenerationConfig`, or None.

    Returns:
        The config; None where there is neither.
    """
    own = getattr(model, "generation_config", None)
    if own is None or given is None:
        return copy.deepcopy(own if given is None else given)
    whole = copy.deepcopy(own)
    set_there = {key: value for key, value in given.to_diff_dict().items() if value is not None}
    whole.update(**{key: value for key, value in set_there.items() if key != "transformers_version"})
    return whole


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
