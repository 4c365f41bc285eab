"""Exporting component by component: configs, and errors that say which component."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from polyport import ExportedModel
from polyport.config import ExportConfig
from polyport.errors import ConfigError, ExportError, InputError
from polyport.generation.exporting import export_generation
from polyport.markers import hookimpl
from polyport.metadata import ExportMetadata
from polyport.pipeline import CapturedCall, ExportedComponent, TracedProgram
from polyport.session import Session


class Tracer:
    """Traces nothing, and keeps what it was asked to trace; fails at the calls that it is told to."""

    def __init__(self, fail: int | None = None) -> None:
        self.calls: list[tuple[CapturedCall, ExportConfig]] = []
        self.fail = fail

    @hookimpl(tryfirst=True)
    def polyport_trace(self, call: CapturedCall, config: ExportConfig) -> TracedProgram:
        if len(self.calls) == self.fail:
            raise ExportError("this can't be traced", stage="trace")
        self.calls.append((call, config))
        return TracedProgram(program=None, metadata=ExportMetadata(export_dtype="float32"), call=call)

    @hookimpl(tryfirst=True)
    def polyport_lower(self, traced: TracedProgram, config: ExportConfig) -> ExportedComponent:
        return ExportedComponent(program=b"", metadata=traced.metadata)


@pytest.fixture
def export(fake_backend: str, tiny_llama: Any, token_ids: Any) -> Callable[..., tuple[ExportedModel, Tracer]]:
    def run(config: Any, fail: int | None = None, **options: Any) -> tuple[ExportedModel, Tracer]:
        tracer = Tracer(fail)
        jobs = [(Session(fake_backend, [tracer]), config)]
        several = options.pop("multi_token_decode", False)
        sample = token_ids(1, 5)
        return export_generation(tiny_llama, sample, jobs, None, several)[fake_backend], tracer

    return run


def _levels(tracer: Tracer) -> list[Any]:
    return [config.level for _, config in tracer.calls]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("config", "levels"),
    [
        (None, [1, 1]),
        ({"dynamic": True}, [1, 1]),
        ({"dynamic": True, "level": 5}, [5, 5]),
        ({"export_format": "fake", "dynamic": True, "level": 5}, [5, 5]),
        ({"prefill": {"level": 2}, "decode": {"dynamic": True, "level": 3}}, [2, 3]),
        ({"decode": {"dynamic": True, "level": 3}, "prefill": None}, [1, 3]),
        ({"prefill": {"level": 3}, "decode": None}, [3, 1]),
    ],
    ids=str,
)
def test_one_config_or_one_per_component(export: Any, config: Any, levels: list[int]) -> None:
    exported, tracer = export(config)
    assert list(exported) == ["prefill", "decode"]
    assert _levels(tracer) == levels


def test_config_objects_per_component(export: Any, fake_backend: str) -> None:
    config_class = Session(fake_backend).backend.config_class
    config = {"prefill": config_class(level=4), "decode": config_class(level=6, dynamic=True)}  # type: ignore[call-arg]
    assert _levels(export(config)[1]) == [4, 6]
    whole = config_class(level=9, dynamic=True)  # type: ignore[call-arg]
    assert _levels(export(whole)[1]) == [9, 9]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"prefill": {}}, r"by component lacks decode\. The components are prefill, decode"),
        ({"prefill": {}, "decode": {}, "encoder": {}}, "names encoder, which there isn't"),
        ({"decoder": {}}, "lacks prefill, decode and names decoder, which there isn't"),
        ({"prefill": {}, "decode": {"levle": 2}}, "levle"),
        ({"level": 2, "decode": {}}, "decode"),
        (
            {"dynamic": False},
            r"a cache of the sample's length, which grows.*dynamic=True, or with a static cache",
        ),
        ({}, "a cache of the sample's length, which grows"),
        ({"prefill": {"dynamic": True}, "decode": {}}, "a cache of the sample's length, which grows"),
    ],
    ids=str,
)
def test_configs_that_do_not_fit(export: Any, config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export(config)


def test_each_component_is_captured_from_a_call_of_the_model(export: Any) -> None:
    exported, tracer = export({"dynamic": True})
    prefill, decode = (call for call, _ in tracer.calls)
    assert prefill.axes["input_ids"] == {0: "batch", 1: "sequence"}
    assert prefill.axes["logits_to_keep"].keys() == {0}
    assert decode.axes["input_ids"] == {0: "batch"}
    assert decode.axes["attention_mask"] == {0: "batch", 1: "past+1"}
    assert decode.axes["cache.layers.1.values"] == {0: "batch", 2: "past"}
    assert exported.generation is not None
    assert exported.generation.architecture == "LlamaForCausalLM"
    assert not exported.leftovers


def test_any_number_of_tokens(export: Any) -> None:
    exported, tracer = export({"dynamic": True}, multi_token_decode=True)
    assert list(exported) == ["decode"]
    call = tracer.calls[0][0]
    assert call.axes["input_ids"] == {0: "batch", 1: "sequence"}
    assert call.axes["attention_mask"] == {0: "batch", 1: "past+sequence"}
    assert call.defaults["attention_mask"] == "ones:batch,past+sequence"
    assert call.defaults["logits_to_keep"] == "arange:sequence"
    assert call.ranges["past"].min == 0
    assert exported.generation is not None
    assert exported.generation.multi_token_decode


@pytest.mark.parametrize(("fail", "name"), [(0, "prefill"), (1, "decode")])
def test_errors_name_the_component(export: Any, fail: int, name: str) -> None:
    with pytest.raises(ExportError, match=f"Component '{name}': this can't be traced") as caught:
        export(None, fail=fail)
    assert caught.value.stage == "trace"


def test_formats_that_can_not_work_are_refused_before_any_work(fake_backend: str, token_ids: Any) -> None:
    with pytest.raises(ExportError, match="Only a model"):
        export_generation("llama", token_ids(1, 5), [(Session(fake_backend), None)], None, False)


def test_wrong_samples(fake_backend: str, tiny_llama: Any) -> None:
    sample: Mapping[str, Any] = {"input_ids": torch.tensor([[1, 2, 999]])}
    with pytest.raises(InputError, match="itself fails to generate from these inputs"):
        export_generation(tiny_llama, sample, [(Session(fake_backend), None)], None, False)
