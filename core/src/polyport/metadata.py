"""What an export records about each of its graphs.

Everything here is data: it goes to `export.json` and comes back from there, checked. The field names `architecture`,
`packages`, `export_config`, `export_dtype`, `export_device`, `kwargs`, `in_spec`, `out_spec`, `in_constants` and
`out_constants` are the ones transformers (>= 5.23) writes, so that its exports load here and ours load there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import cattrs

from polyport.errors import ArtifactError

#: One axis of a tensor: its size where it is fixed, its name where it may vary.
AxisSize = int | str


@attrs.frozen
class TensorInfo:
    """One tensor that goes into or comes out of a graph.

    Args:
        name: Dotted path of the leaf (`input_ids`, `cache.layers.0.keys`), the same in every format.
        dtype: Name of the torch dtype without the `torch.` (`"float32"`, `"int64"`).
        shape: For every axis its size (fixed) or its name (dynamic). Axes of one name have one size in a call.
            Derived output axes hold an expression in these names (`"2*batch"`); `"?"` is an axis nothing is known about.
    """

    name: str
    dtype: str
    shape: tuple[AxisSize, ...]

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)


@attrs.frozen
class AxisRange:
    """Sizes that a named axis may take: `min <= size <= max`, `max` None where nothing bounds it."""

    min: int = 1
    max: int | None = None


@attrs.frozen(kw_only=True)
class ExportMetadata:
    """The record of one exported graph.

    Args:
        architecture: Class name of the model.
        packages: Distribution -> version, of what made the export.
        export_config: The config as plain values.
        export_dtype: dtype of the model's parameters, without the `torch.`.
        export_device: Device the model was on.
        kwargs: Per traced forward kwarg its rank, shape and dtype (tensors), or the same nested (containers).
        in_spec: Structure of the call, `((), kwargs)`, as written by `polyport.structure.dump_structure`.
        out_spec: Structure of what the model returns, likewise.
        in_constants: Kwargs that were traced as constants.
        out_constants: Leaves of the output that are no tensors, as `[leaf index, value]`. A number that follows from the
            sizes of the inputs is `{"size": expression}`.
        out_pieces: Leaves of the output that stand for a tuple of pieces, as `[leaf index, axis name]`: the leaf is cut into
            as many equal pieces as that axis is long.
        inputs: The tensors that go in, in the graph's order.
        outputs: The tensors that come out, in the graph's order.
        axes: Every named axis with the sizes it may take.
        defaults: Inputs that may be left out of a call, with how they are filled then:
            `{"attention_mask": "ones_like:input_ids"}`.
        in_place: Inputs that a call changes where they lie, such as the buffers of a static cache.
        patches: Ids of the patches and graph fixes that were active.
        backend: What else a backend needs to load and run the graph; JSON values only.
    """

    architecture: str | None = None
    packages: dict[str, str] = attrs.field(factory=dict)
    export_config: dict[str, Any] = attrs.field(factory=dict)
    export_dtype: str | None = None
    export_device: str | None = None
    kwargs: dict[str, Any] = attrs.field(factory=dict)
    in_spec: str | None = None
    out_spec: str | None = None
    in_constants: dict[str, Any] = attrs.field(factory=dict)
    out_constants: list[Any] = attrs.field(factory=list)
    out_pieces: list[tuple[int, str]] = attrs.field(factory=list)
    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[TensorInfo, ...] = ()
    axes: dict[str, AxisRange] = attrs.field(factory=dict)
    defaults: dict[str, str] = attrs.field(factory=dict)
    in_place: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()
    backend: dict[str, Any] = attrs.field(factory=dict)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the tensors that go in, in the graph's order."""
        return tuple(info.name for info in self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the tensors that come out, in the graph's order."""
        return tuple(info.name for info in self.outputs)

    @property
    def dynamic_axes(self) -> dict[str, dict[int, str]]:
        """Input leaf -> {axis index: name}, for the axes that may vary."""
        named = {
            info.name: {i: size for i, size in enumerate(info.shape) if isinstance(size, str)}
            for info in self.inputs
        }
        return {name: axes for name, axes in named.items() if axes}

    def constant_outputs(self) -> dict[int, Any]:
        """Leaf index -> value, of the output leaves that are no tensors.

        Raises:
            ArtifactError: The record is damaged.
        """
        pairs = self.out_constants
        if not all(
            isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], int) for pair in pairs
        ):
            raise ArtifactError(
                f"The export records the constant outputs {pairs!r}, not [index, value] pairs.", stage="load"
            )
        return dict(pairs)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        values: dict[str, Any] = CONVERTER.unstructure(self)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ExportMetadata:
        """Back from JSON values. Fields that a newer version added are left out.

        Raises:
            ArtifactError: A field holds something of another type than the record allows.
        """
        known = {field.name for field in attrs.fields(cls)}
        try:
            return CONVERTER.structure({k: v for k, v in values.items() if k in known}, cls)
        except (cattrs.BaseValidationError, TypeError, ValueError, AttributeError) as error:
            reasons = (
                cattrs.transform_error(error)
                if isinstance(error, cattrs.BaseValidationError)
                else [str(error)]
            )
            raise ArtifactError(
                f"The export's metadata can't be read: {'; '.join(reasons)}.", stage="load"
            ) from error


def _axis_size(value: Any, _: Any) -> AxisSize:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"an axis is a size or a name, not {value!r}")
    return value


def _as_is(value: Any, kind: type) -> Any:
    # cattrs would make a text of anything, and a number of a text
    if type(value) is not kind:
        raise ValueError(f"{kind.__name__} expected, not {value!r}")
    return value


#: Reads JSON values, and makes no value of another type out of any.
CONVERTER = cattrs.Converter(detailed_validation=True)
CONVERTER.register_structure_hook(AxisSize, _axis_size)
for _kind in (str, int, bool):
    CONVERTER.register_structure_hook(_kind, _as_is)
