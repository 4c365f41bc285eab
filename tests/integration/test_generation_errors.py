"""What can't be generated gets one clear error, before anything is computed wrongly."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)
from transformers.cache_utils import DynamicCache

from polyport import DynamoExporter, ExportedModel, OnnxExporter, OpenVINOExporter
from polyport.errors import ArtifactError, ExportError, InputError

pytestmark = pytest.mark.xdist_group("generation errors")

EXPORTERS = {"dynamo": DynamoExporter, "onnx": OnnxExporter, "openvino": OpenVINOExporter}
ROOM = 16

OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(scope="session")
def model() -> Any:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def static(request: pytest.FixtureRequest, model: Any) -> ExportedModel:
    config = copy.deepcopy(model.generation_config)
    config.update(cache_implementation="static", max_cache_len=ROOM)
    sample = {"input_ids": _ids(1, 5)}
    return EXPORTERS[request.param]().export_for_generation(model, sample, {"dynamic": True}, config)


@pytest.fixture(scope="session")
def fixed(request: pytest.FixtureRequest, model: Any) -> ExportedModel:
    """For batches of 1 and prompts of 5 tokens."""
    config = GenerationConfig.from_dict(
        {**model.generation_config.to_dict(), "cache_implementation": "static", "max_cache_len": ROOM}
    )
    exporter = EXPORTERS[request.param]()
    return exporter.export_for_generation(model, {"input_ids": _ids(1, 5)}, {"dynamic": False}, config)


@pytest.fixture(scope="session")
def saved(request: pytest.FixtureRequest, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    exporter = EXPORTERS[request.param]()
    exported = exporter.export_for_generation(model, {"input_ids": _ids(1, 5)}, {"dynamic": True})
    folder = tmp_path_factory.mktemp("saved") / "export"
    exported.save_pretrained(folder)
    return folder


def _formats(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(name, EXPORTERS, indirect=True)


# ── static caches ───────────────────────────────────────────────────────────────────────────────────────────────────


def _static(model: Any, room: int) -> dict[str, Any]:
    """The settings of a call with a static cache of one's own."""
    return {
        "cache": StaticCache(config=model.config, max_cache_len=room),
        "cache_implementation": None,
        **OPTIONS,
    }


@_formats("static")
def test_a_static_cache_that_is_full(static: ExportedModel, model: Any) -> None:
    wanted = model.generate(_ids(1, 12), **OPTIONS).tolist()
    assert static.generate(_ids(1, 12), **_static(model, ROOM)).tolist() == wanted
    with pytest.raises(
        InputError, match="static cache has room for 16 tokens: 16 are in it, and 1 more don't fit"
    ):
        static.generate(_ids(1, 14), **_static(model, ROOM))
    with pytest.raises(
        InputError, match="static cache has room for 16 tokens: 0 are in it, and 20 more don't fit"
    ):
        static.generate(_ids(1, 20), **_static(model, ROOM))
    # and it goes on working
    assert static.generate(_ids(1, 12), **_static(model, ROOM)).tolist() == wanted


@_formats("static")
@pytest.mark.parametrize("room", [9, 24])
def test_static_caches_of_other_sizes(static: ExportedModel, model: Any, room: int) -> None:
    wanted = model.generate(_ids(1, 5), **OPTIONS).tolist()
    assert static.generate(_ids(1, 5), **_static(model, room)).tolist() == wanted


@_formats("static")
def test_a_static_cache_grows_with_what_is_generated(static: ExportedModel, model: Any) -> None:
    assert static.generate(_ids(1, 30), **OPTIONS).tolist() == model.generate(_ids(1, 30), **OPTIONS).tolist()


@_formats("static")
def test_other_caches_than_a_static_export_takes(static: ExportedModel) -> None:
    for options in ({"cache": DynamicCache()}, {"use_cache": False}):
        with pytest.raises(InputError):
            static.generate(_ids(1, 5), cache_implementation=None, **options, **OPTIONS)


# ── sizes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@_formats("fixed")
def test_another_batch_or_length_than_a_fixed_export_has(fixed: ExportedModel, model: Any) -> None:
    assert fixed.generate(_ids(1, 5), **OPTIONS).tolist() == model.generate(_ids(1, 5), **OPTIONS).tolist()
    with pytest.raises(InputError, match="Axis 0 of 'input_ids' has size 2, which must be 1"):
        fixed.generate(_ids(2, 5), **OPTIONS)
    with pytest.raises(InputError, match="Axis 1 of 'input_ids' has size 6, which must be 5"):
        fixed.generate(_ids(1, 6), **OPTIONS)
    with pytest.raises(InputError, match="Axis 0 of 'input_ids' has size 3, which must be 1"):
        fixed.generate(_ids(1, 5), num_beams=3, **OPTIONS)


# ── what the folder lacks ───────────────────────────────────────────────────────────────────────────────────────────


@_formats("saved")
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_component_is_missing(saved: Path, name: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "export"))
    document = json.loads((folder / "export.json").read_text())
    file = document["components"][name]["file"]
    (folder / file).unlink()
    with pytest.raises(ArtifactError, match=f"lacks the file '{file}' that its manifest names"):
        ExportedModel.from_pretrained(folder)
    del document["components"][name]
    (folder / "export.json").write_text(json.dumps(document))
    loaded = ExportedModel.from_pretrained(folder)
    with pytest.raises(ArtifactError, match=f"lacks the component '{name}', which its generation needs"):
        loaded.generate(_ids(1, 5))


@_formats("saved")
def test_inputs_that_the_sample_did_not_have(saved: Path) -> None:
    loaded = ExportedModel.from_pretrained(saved)
    with pytest.raises(
        InputError, match=r"exported without 'inputs_embeds'\. Export from a sample that has it"
    ):
        loaded.generate(inputs_embeds=torch.zeros(1, 5, 32), **OPTIONS)
    with pytest.raises(ValueError, match="pixel_values"):  # what the model doesn't take, as in eager
        loaded.generate(_ids(1, 5), pixel_values=torch.zeros(1, 3), **OPTIONS)
    with pytest.raises(InputError, match=r"output_attentions=.*can't run with|output_attentions"):
        loaded.generate(_ids(1, 5), output_attentions=True, return_dict_in_generate=True, **OPTIONS)


@_formats("saved")
def test_as_a_model_it_has_no_weights_to_give(saved: Path, tmp_path: Path) -> None:
    running = ExportedModel.from_pretrained(saved).as_transformers()
    with pytest.raises(InputError, match="holds no weights"):
        running.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"runs an export on cpu.*exported\.to\('meta'\)"):
        running.to("meta")
    with pytest.raises(InputError, match=r"can't be converted to torch\.float16"):
        running.to(torch.float16)
    assert running.to("cpu") is running
    assert running.to(torch.float32) is running


def test_models_that_do_not_generate() -> None:
    config = BertConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    bert = BertForSequenceClassification(config).eval()
    with pytest.raises(ExportError, match="does not generate"):
        DynamoExporter().export_for_generation(bert, {"input_ids": _ids(1, 5) % 32})


def test_exports_of_one_graph(model: Any) -> None:
    exported = DynamoExporter().export(model, {"input_ids": _ids(1, 5)}, {"dynamic": False})
    with pytest.raises(InputError, match=r"can't generate.*export_for_generation\(\)"):
        exported.generate(_ids(1, 5))
