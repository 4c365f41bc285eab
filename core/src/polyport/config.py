"""Export configs: what a user can ask of an export, whatever the format.

Each backend subclasses :class:`ExportConfig` with its own options and names it in its
:class:`~polyport.hookspecs.BackendInfo`. Configs are frozen, and go to and from dicts and JSON without loss, apart
from `dynamic_shapes` and `quantizer`, which hold live objects: a dict records them in a readable form.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import attrs

from polyport.errors import ConfigError


@attrs.frozen(kw_only=True)
class ExportConfig:
    """Options that every format takes.

    Args:
        dynamic: Make every axis that can vary dynamic: any batch >= 1, any sequence >= 1, any cache length >= 0 and any
            image size the model itself takes, whatever the sizes of the sample inputs.
        dynamic_shapes: What `torch.export.export` takes under that name, for people who want bounds
            (`torch.export.Dim("batch", min=1, max=8)`), given per forward kwarg. Takes the place of `dynamic`.
        strict: Trace with TorchDynamo's bytecode analysis (`torch.export.export(strict=True)`).
        prefer_deferred_runtime_asserts_over_guards: Passed on to `torch.export.export`: shape conditions become checks at
            run time in place of errors at export.
        quantizer: An object that quantizes the traced graph or the lowered program (see
            `polyport.hookspecs.polyport_quantize`).
    """

    #: The format this config belongs to. Set by each backend's subclass.
    export_format: ClassVar[str] = ""

    dynamic: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    dynamic_shapes: Any = None
    strict: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    prefer_deferred_runtime_asserts_over_guards: bool = attrs.field(
        default=False, validator=attrs.validators.instance_of(bool)
    )
    quantizer: Any = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build the config from a dict, `export_format` included or not.

        Raises:
            ConfigError: An unknown key (the message lists the valid ones), a wrong type, or another format's dict.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"{cls.__name__}: a dict of options is needed, not {type(values).__name__}.")
        options = dict(values)
        wanted = options.pop("export_format", cls.export_format)
        if wanted != cls.export_format:
            raise ConfigError(
                f"{cls.__name__} is the config of format {cls.export_format!r}, not of {wanted!r}."
            )
        valid = [field.name for field in attrs.fields(cls)]
        for key in options:
            if key not in valid:
                near = difflib.get_close_matches(str(key), valid, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"{cls.__name__} has no option {key!r}.{hint} Valid options: {', '.join(valid)}."
                )
        try:
            return cls(**options)
        except (TypeError, ValueError) as error:
            # attrs' validators put the offending value in args[0]; its other args are objects nobody wants to read
            raise ConfigError(f"{cls.__name__}: {error.args[0]}") from error

    def to_dict(self) -> dict[str, Any]:
        """The options as plain values, `export_format` included; `from_dict` takes it back."""
        values: dict[str, Any] = {"export_format": self.export_format}
        for field in attrs.fields(type(self)):
            values[field.name] = getattr(self, field.name)
        return values

    def to_json(self) -> str:
        """The options as JSON text with sorted keys; live objects appear in a readable form."""
        return json.dumps(self.record(), indent=2, sort_keys=True)

    def record(self) -> dict[str, Any]:
        """What metadata keeps of the config: `to_dict` with live objects replaced by a description of them."""
        return {key: plain(value) for key, value in self.to_dict().items()}

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build the config from what `to_json` wrote."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{cls.__name__}: not JSON ({error}).") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{cls.__name__}: the JSON holds {type(values).__name__}, not an object.")
        return cls.from_dict(values)


def plain(value: Any) -> Any:
    """`value` as JSON types; a `Dim` becomes its name and bounds, anything else foreign its `repr`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if hasattr(value, "__name__") and hasattr(value, "min") and hasattr(value, "max"):
        return f"{value.__name__}[{value.min}, {value.max}]"
    if vars(object)["__repr__"] is type(value).__repr__:
        return type(value).__qualname__  # an address in memory would make every export's bytes another
    return repr(value)
