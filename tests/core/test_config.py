from __future__ import annotations

import json
from typing import Any, ClassVar

import attrs
import pytest
import torch

from polyport import AutoExportConfig, AutoHfExporter, ExportConfig
from polyport.errors import BackendNotInstalled, ConfigError


@attrs.frozen(kw_only=True)
class ToyConfig(ExportConfig):
    export_format: ClassVar[str] = "toy"

    opset: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.instance_of(int))
    )
    optimize: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))


def test_dict_round_trip() -> None:
    config = ToyConfig(dynamic=True, strict=True, opset=20, optimize=False)
    assert ToyConfig.from_dict(config.to_dict()) == config


def test_json_round_trip() -> None:
    config = ToyConfig(prefer_deferred_runtime_asserts_over_guards=True, opset=20)
    assert ToyConfig.from_json(config.to_json()) == config


def test_dict_names_the_format() -> None:
    assert ToyConfig().to_dict()["export_format"] == "toy"


def test_json_has_sorted_keys_and_says_the_same_twice() -> None:
    text = ToyConfig(dynamic=True).to_json()
    assert text == ToyConfig(dynamic=True).to_json()
    assert list(json.loads(text)) == sorted(json.loads(text))


def test_from_dict_without_the_format() -> None:
    assert ToyConfig.from_dict({"opset": 18}) == ToyConfig(opset=18)


def test_from_dict_leaves_the_dict_alone() -> None:
    values = {"export_format": "toy", "opset": 18}
    ToyConfig.from_dict(values)
    assert values == {"export_format": "toy", "opset": 18}


def test_configs_are_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        ToyConfig().dynamic = True  # type: ignore[misc]


def test_unknown_key_names_the_nearest_and_all() -> None:
    with pytest.raises(
        ConfigError, match=r"no option 'optimise'. Did you mean 'optimize'\?.*dynamic_shapes, strict"
    ):
        ToyConfig.from_dict({"optimise": True})


def test_unknown_key_without_a_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"no option 'zzz'\. Valid options: dynamic, ") as caught:
        ToyConfig.from_dict({"zzz": 1})
    assert "Did you mean" not in str(caught.value)


def test_key_that_is_no_text() -> None:
    with pytest.raises(ConfigError, match="no option 3"):
        ToyConfig.from_dict({3: 1})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"dynamic": "yes"}, "dynamic"),
        ({"dynamic": 1}, "dynamic"),
        ({"strict": None}, "strict"),
        ({"opset": "20"}, "opset"),
        ({"optimize": 0}, "optimize"),
    ],
)
def test_wrong_type_names_the_option(values: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"ToyConfig: .*'{name}'"):
        ToyConfig.from_dict(values)


def test_config_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="zzz"):
        ToyConfig.from_dict({"zzz": 1})


def test_another_formats_dict() -> None:
    with pytest.raises(ConfigError, match="ToyConfig is the config of format 'toy', not of 'other'"):
        ToyConfig.from_dict({"export_format": "other"})


def test_not_a_dict() -> None:
    with pytest.raises(ConfigError, match="a dict of options is needed, not list"):
        ToyConfig.from_dict([("opset", 18)])  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["{", "", "[1]", '"toy"', "null"])
def test_bad_json(text: str) -> None:
    with pytest.raises(ConfigError, match=r"ToyConfig: .*JSON"):
        ToyConfig.from_json(text)


def test_record_describes_dims() -> None:
    config = ToyConfig(dynamic_shapes={"input_ids": {0: torch.export.Dim("batch", min=1, max=8)}})
    assert config.record()["dynamic_shapes"] == {"input_ids": {"0": "batch[1, 8]"}}
    json.loads(config.to_json())


class _Quantizer:
    pass


@attrs.frozen
class _Described:
    bits: int = 4

    def to_dict(self) -> dict[str, Any]:
        return {"bits": self.bits}


def test_record_holds_no_addresses() -> None:
    """Two processes must write the same bytes."""
    assert ToyConfig(quantizer=_Quantizer()).record()["quantizer"] == "_Quantizer"
    assert ToyConfig(quantizer=_Described()).record()["quantizer"] == {"bits": 4}
    assert "0x" not in ToyConfig(dynamic_shapes={"x": {0: torch.export.Dim.AUTO}}).to_json()


def test_dict_keeps_live_objects() -> None:
    quantizer = _Quantizer()
    assert ToyConfig.from_dict(ToyConfig(quantizer=quantizer).to_dict()).quantizer is quantizer


# ── by format ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_auto_config(fake_backend: str) -> None:
    config = AutoExportConfig.from_dict({"export_format": "fake", "level": 3})
    assert type(config).__name__ == "FakeConfig"
    assert config.to_dict()["level"] == 3


def test_auto_config_without_format(fake_backend: str) -> None:
    with pytest.raises(ConfigError, match=r"needs the key 'export_format' \(installed formats: .*fake"):
        AutoExportConfig.from_dict({"level": 3})


def test_auto_config_of_unknown_format(fake_backend: str) -> None:
    with pytest.raises(BackendNotInstalled, match=r"'tofu' \(installed: .*fake.*pip install polyport-tofu"):
        AutoExportConfig.from_dict({"export_format": "tofu"})


def test_auto_exporter_is_the_backends_own(fake_backend: str) -> None:
    from polyport_fake import FakeConfig, FakeExporter  # type: ignore[import-not-found]

    assert type(AutoHfExporter.from_config({"export_format": "fake"})) is FakeExporter
    assert type(AutoHfExporter.from_config(FakeConfig(level=2))) is FakeExporter
