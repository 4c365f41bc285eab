"""The object behind `generate`: the model's own class, without weights, with components in the places of its modules.

What happens between the components (merging images into text, positions, beams, Whisper's timestamps...) is the model's own
code. It is built on the meta device from the saved config; whatever would compute with a weight that no component covers
finds it among the tensors that were saved beside them.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from polyport.errors import ArtifactError, InputError
from polyport.generation import states
from polyport.generation.masks import always_make_masks
from polyport.generation.record import GenerationRecord
from polyport.generation.running import Component, Host, as_forward
from polyport.generation.stages import DECODE, PREFILL


class _Exported:
    """What an exported model does differently from the class that it is an instance of."""

    _exported_device: torch.device
    _exported_dtype: torch.dtype
    _exported_needs_mask = False

    @property
    def device(self) -> torch.device:
        return self._exported_device

    @property
    def dtype(self) -> torch.dtype:
        return self._exported_dtype

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Where it runs is the export's to say; a call that changes nothing is let through."""
        wanted, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if wanted is not None and wanted.type != self.device.type:
            raise InputError(
                f"This model runs an export on {self.device}. Load or move the export itself: "
                f"ExportedModel.from_pretrained(..., device={str(wanted)!r}), or exported.to({str(wanted)!r})."
            )
        if dtype is not None and dtype != self.dtype:
            raise InputError(f"This model runs an export in {self.dtype}; it can't be converted to {dtype}.")
        return self

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        raise InputError(
            "This model runs an export and holds no weights. Save the export: exported.save_pretrained()."
        )

    def _prepare_cache_for_generation(self, *args: Any) -> Any:
        return states.with_all_tokens(super()._prepare_cache_for_generation)(*args)  # type: ignore[misc]


def _preparing(own: Any) -> dict[str, Any]:
    """`prepare_inputs_for_generation`, whose signature tells `generate` what the model takes.

    It adds the mask of ones that `generate` leaves out, where the graph can't tell how long it would be.
    """
    original = getattr(own, "prepare_inputs_for_generation", None)
    if original is None:
        return {}

    @functools.wraps(original)
    def prepare(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if self._exported_needs_mask and kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = torch.ones_like(input_ids)
        return original(self, input_ids, *args, **kwargs)

    return {"prepare_inputs_for_generation": prepare}


def build(
    config: Any,
    architecture: str | None,
    device: torch.device,
    dtype: torch.dtype,
    generation_config: Any = None,
    attn_implementation: Mapping[str, str] | None = None,
) -> Any:
    """The model's own class on the meta device.

    Args:
        config: The model's config.
        architecture: Name of the class.
        device: The device that it claims to be on.
        dtype: The dtype that it claims to have.
        generation_config: What it generates with by default.
        attn_implementation: The attention that its code is told to use (see `GenerationRecord`).

    Raises:
        ArtifactError: transformers has no such class, or can't build it from the config.
    """
    cls = _model_class(architecture)
    config = copy.deepcopy(config)
    try:
        with torch.device("meta"):
            model = cls._from_config(
                config, attn_implementation=dict(attn_implementation) if attn_implementation else None
            )
    except Exception as error:
        raise ArtifactError(
            f"transformers can't build {architecture} from the export's config: {type(error).__name__}: {error}",
            stage="load",
        ) from error
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            own = type(module)
            module.__class__ = type(
                own.__name__,
                (_Exported, own),
                {"__module__": own.__module__, "__qualname__": own.__qualname__, **_preparing(own)},
            )
            module._exported_device, module._exported_dtype = device, dtype  # type: ignore[assignment]
    model.eval()
    if generation_config is not None:
        for module in model.modules():
            if hasattr(module, "generation_config"):
                module.generation_config = copy.deepcopy(generation_config)
    always_make_masks(model)
    return model


def _model_class(name: str | None) -> Any:
    import transformers

    cls = getattr(transformers, name, None) if name and name.isidentifier() else None
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise ArtifactError(
            f"The export is one of {name!r}, which is no model of transformers {transformers.__version__}.",
            stage="load",
        )
    return cls


def fit(
    model: Any,
    record: GenerationRecord,
    components: Mapping[str, Component],
    leftovers: Mapping[str, torch.Tensor],
) -> Any:
    """Put components and saved tensors into the model.

    Raises:
        ArtifactError: The export lacks a component, or the record names a module that the model doesn't have.
    """
    missing = [name for name in (DECODE, *record.steps, *record.modules) if name not in components]
    if missing:
        raise ArtifactError(
            f"The export lacks the component {missing[0]!r}, which its generation needs. It has: {', '.join(components)}.",
            stage="load",
        )
    _place_tensors(model, leftovers, components[DECODE].device)
    for name, path in record.modules.items():
        module = _module(model, path)
        component = components[name]
        module.forward = as_forward(lambda _component=component, **kwargs: _component(kwargs), module.forward)
    host = _module(model, record.host)
    original = host.forward
    run = Host(
        prefill=components.get(PREFILL),
        decode=components[DECODE],
        many=record.multi_token_decode,
        static=record.static,
        own=original if record.split else None,
        encode=_encoding(model) if "encoder" in record.modules else None,
    )
    host.forward = as_forward(run, original)
    metadata = components[DECODE].metadata
    host._exported_needs_mask = "attention_mask" in set(metadata.input_names) - set(metadata.defaults)
    return model


def _module(model: torch.nn.Module, path: str) -> Any:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise ArtifactError(
            f"The export names a module {path!r}, which {type(model).__name__} doesn't have.", stage="load"
        ) from error


def _place_tensors(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    for name, tensor in tensors.items():
        path, _, own = name.rpartition(".")
        module = _module(model, path)
        placed = tensor.to(device)
        if own in module._parameters:
            module._parameters[own] = torch.nn.Parameter(placed, requires_grad=False)
        elif own in module._buffers:
            module._buffers[own] = placed
        else:
            raise ArtifactError(
                f"The export holds a tensor {name!r}, which the model doesn't have.", stage="load"
            )


def _encoding(model: Any) -> Any:
    """What runs the encoder where a call of forward brings its raw inputs, as Whisper's language detection does."""

    def encode(kwargs: dict[str, Any]) -> dict[str, Any]:
        if kwargs.get("encoder_outputs") is not None:
            return kwargs
        encoder = model.get_encoder()
        takes = inspect.signature(encoder.forward).parameters
        own = {
            key: value
            for key, value in kwargs.items()
            if key in takes and isinstance(value, torch.Tensor) and not key.startswith("decoder_")
        }
        if not own:
            return kwargs
        raw = {key for key in own if "mask" not in key}
        rest = {key: value for key, value in kwargs.items() if key not in raw}
        return {**rest, "encoder_outputs": encoder(**own)}

    return encode


def make_model(exported: Any) -> Any:
    """The model's own class around an export (see `ExportedModel.as_transformers`).

    Raises:
        ArtifactError: See `build` and `fit`.
    """
    if exported.config is None:
        raise ArtifactError("The export has no config, so the model can't be built around it.", stage="load")
    record = exported.generation
    components = {
        name: Component(name, component.metadata, functools.partial(exported.caller, name))
        for name, component in exported.components.items()
    }
    if record is not None:
        step = components.get(DECODE) or next(iter(components.values()))
        model = build(
            exported.config, record.architecture, step.device, exported.dtype,
            exported.generation_config, record.attn_implementation,
        )  # fmt: skip
        return fit(model, record, components, exported.leftovers)
    name, only = next(iter(exported.components.items()))
    caller = exported.caller(name)
    device = torch.device(caller.runner.device)
    model = build(
        exported.config, only.metadata.architecture, device, exported.dtype, exported.generation_config
    )
    model.forward = as_forward(
        lambda **kwargs: caller({k: v for k, v in kwargs.items() if k != "return_dict"}), model.forward
    )
    return model
