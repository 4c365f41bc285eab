"""Which modules of a model become components of its generation.

A call of `generate` is watched. The module that it calls once per token is the *host*: its calls are the prefill and the
decode steps. What it calls besides (encoders, projectors, embeddings) become components of their own, and where the host's
first call puts what encoders found into the text, that call stays plain Python between components.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from polyport.errors import ExportError
from polyport.generation.watching import Call

#: Components with these names are steps of the host.
PREFILL, DECODE = "prefill", "decode"

STAGE = "decompose"


@attrs.frozen(kw_only=True, eq=False)
class Plan:
    """What the components of a model's generation are.

    Args:
        host: Path of the module that is called once per token.
        modules: Component -> path of its module, of the components that are no steps of the host.
        split: Whether the host's first call runs as Python between components, in place of a `prefill`.
    """

    host: str
    modules: Mapping[str, str]
    split: bool

    def covered(self) -> list[str]:
        """Paths of the modules that components stand for as a whole."""
        return [*self.modules.values(), *(() if self.split else (self.host,))]


def make_plan(model: Any, calls: list[Call], steps: int) -> Plan:
    """Choose the components.

    Args:
        model: The model.
        calls: The outermost calls of one watched `generate`.
        steps: How many tokens it made.

    Raises:
        ExportError: No module was called once per token.
    """
    host = _host(model, calls, steps)
    named = _named(model, host.module)
    first = next(call for call in calls if call.path == host.path)
    outside = [call for call in calls if call.path != host.path]
    split = _splits(model, first, outside, named)
    chosen: dict[str, str] = {}
    for call in [*outside, *(first.children if split else ())]:
        for part in _parts(call, named):
            if part.path not in chosen.values():
                chosen[_name(part, named, chosen)] = part.path
    return Plan(host=host.path, modules=chosen, split=split)


def _host(model: Any, calls: list[Call], steps: int) -> Call:
    counts = Counter(call.path for call in calls)
    path, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if count < steps:
        raise ExportError(
            f"{type(model).__name__}.generate made {steps} tokens without calling one of its modules once per token (its "
            f"outermost calls: {', '.join(f'{name or type(model).__name__} x{n}' for name, n in counts.items()) or 'none'}). "
            "It bypasses forward, so there is no decode step to export; export its parts with export().",
            stage=STAGE,
        )
    return next(call for call in calls if call.path == path)


def _named(model: Any, host: torch.nn.Module) -> dict[int, str]:
    """Id of a module -> the component it is, for the parts that transformers can name."""
    found: dict[int, str] = {}

    def add(module: Any, name: str) -> None:
        if isinstance(module, torch.nn.Module) and module is not model and module is not host:
            found.setdefault(id(module), name)

    if getattr(model.config, "is_encoder_decoder", False):
        add(_asked(model, "get_encoder"), "encoder")
    for modality in ("image", "video", "audio"):
        encoder = _asked(model, "get_encoder", modality=modality)
        add(encoder, "audio_encoder" if modality == "audio" else "image_encoder")
    add(_asked(host, "get_decoder"), "language_model")
    add(_asked(host, "get_output_embeddings"), "lm_head")
    add(_asked(host, "get_input_embeddings"), "embed_tokens")
    return found


def _asked(model: Any, method: str, **arguments: Any) -> Any:
    try:
        return getattr(model, method)(**arguments)
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None  # models that have no such part say so in many ways


def _splits(model: Any, first: Call, outside: list[Call], named: Mapping[int, str]) -> bool:
    """Whether the host's first call merges what encoders found with text, around a language model that can be taken out.

    BLIP-2 and its kind have the encoders beside the host, which gets their results as finished embeddings.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        return False
    encoders = ("image_encoder", "audio_encoder")
    decoder = next((call for call in first.below() if named.get(id(call.module)) == "language_model"), None)
    if decoder is None or any(named.get(id(call.module)) in encoders for call in decoder.below()):
        return False
    seen = [*outside, *(deep for call in outside for deep in call.below()), *first.below()]
    own = {id(module) for module in first.module.modules()}
    return any(named.get(id(call.module)) in encoders and id(call.module) in own for call in seen)


def _parts(call: Call, named: Mapping[int, str]) -> Iterator[Call]:
    """The calls in and below one that are components: named ones, and else the outermost that have no named one inside.

    A module without weights computes nothing that Python can't do in passing.
    """
    inside = [deep for deep in call.below() if id(deep.module) in named]
    if id(call.module) in named or not inside:
        if any(True for _ in call.module.parameters()):
            yield call
        return
    for child in call.children:
        yield from _parts(child, named)


def _name(call: Call, named: Mapping[int, str], taken: Mapping[str, str]) -> str:
    name = named.get(id(call.module)) or call.path.rpartition(".")[2]
    if name.isdigit() or name in taken or name in (PREFILL, DECODE):
        name = call.path.replace(".", "_")
    return name
