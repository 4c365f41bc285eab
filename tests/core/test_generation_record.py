"""What an export records about its generation, read back from files that may be damaged or hostile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LlamaConfig

from polyport import ExportedModel
from polyport.errors import ArtifactError, InputError
from polyport.generation.record import GenerationRecord, attention_of, uncovered_tensors
from polyport.generation.stages import Plan
from polyport.storage import LEFTOVERS

RECORD = GenerationRecord(
    architecture="LlamaForCausalLM",
    host="",
    modules={"embed_tokens": "model.embed_tokens"},
    multi_token_decode=True,
    attn_implementation={"": "sdpa"},
)

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
)

Make = Callable[..., ExportedModel]


@pytest.fixture
def make(make_export: Make) -> Make:
    """An export with the record of a model that generates; its components compute nothing sensible."""

    def made(record: GenerationRecord = RECORD, **options: Any) -> ExportedModel:
        options = {"components": ("embed_tokens", "decode"), "config": CONFIG, **options}
        return make_export(generation=record, **options)

    return made


@pytest.fixture
def saved(make: Make, tmp_path: Path) -> Path:
    folder = tmp_path / "export"
    config = GenerationConfig(max_new_tokens=3)
    make(generation_config=config, leftovers={"model.norm.weight": torch.arange(8.0)}).save_pretrained(folder)
    return folder


def _changed(folder: Path, **values: Any) -> Path:
    """With other values in the record of its generation."""
    path = folder / "export.json"
    document = json.loads(path.read_text())
    document["generation"].update(values)
    path.write_text(json.dumps(document))
    return folder


# ── there and back ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_round_trip() -> None:
    assert GenerationRecord.from_dict(json.loads(json.dumps(RECORD.to_dict()))) == RECORD


def test_what_a_newer_version_added_is_left_out() -> None:
    assert GenerationRecord.from_dict({**RECORD.to_dict(), "speculation": [1]}) == RECORD


def test_what_an_older_version_lacks_has_defaults() -> None:
    assert GenerationRecord.from_dict({"architecture": "A"}) == GenerationRecord(architecture="A")


def test_round_trip_of_an_export(saved: Path) -> None:
    loaded = ExportedModel.from_pretrained(saved)
    assert loaded.generation == RECORD
    assert loaded.generation_config is not None
    assert loaded.generation_config.max_new_tokens == 3
    assert list(loaded.leftovers) == ["model.norm.weight"]
    assert loaded.leftovers["model.norm.weight"].tolist() == list(range(8))


def test_exports_of_one_graph_have_no_record(make_export: Make, tmp_path: Path) -> None:
    make_export().save_pretrained(tmp_path)
    document = json.loads((tmp_path / "export.json").read_text())
    assert not {"generation", "leftovers"} & set(document)
    assert not (tmp_path / LEFTOVERS).exists()
    loaded = ExportedModel.from_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"can't generate.*export_for_generation\(\)"):
        loaded.generate(torch.tensor([[1]]))


def test_saving_over_an_export_leaves_no_leftovers_of_it(saved: Path, make: Make) -> None:
    make().save_pretrained(saved)
    assert not ExportedModel.from_pretrained(saved).leftovers


# ── hostile records ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "values",
    [
        {"modules": "model"},
        {"modules": ["model"]},
        {"modules": None},
        {"modules": 3},
        {"attn_implementation": "sdpa"},
        {"attn_implementation": []},
    ],
    ids=str,
)
def test_wrong_types(saved: Path, values: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match="generation record can't be read"):
        ExportedModel.from_pretrained(_changed(saved, **values))


@pytest.mark.parametrize("value", [[], "text", 3, True], ids=str)
def test_no_record_at_all(saved: Path, value: Any) -> None:
    path = saved / "export.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "generation": value}))
    with pytest.raises(ArtifactError, match="describes the generation wrongly"):
        ExportedModel.from_pretrained(saved)


def test_no_architecture(saved: Path) -> None:
    path = saved / "export.json"
    document = json.loads(path.read_text())
    del document["generation"]["architecture"]
    path.write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match="generation record can't be read"):
        ExportedModel.from_pretrained(saved)


@pytest.mark.parametrize(
    "name",
    [
        "pipeline",
        "LlamaConfig",
        "StaticCache",
        "Trainer",
        "NoSuchModel",
        "os.system",
        "models.llama.modeling_llama",
        "__class__",
        "",
        "LlamaForCausalLM.generate",
    ],
)
def test_an_architecture_that_is_no_model(saved: Path, name: str) -> None:
    loaded = ExportedModel.from_pretrained(_changed(saved, architecture=name))
    with pytest.raises(ArtifactError, match="which is no model of transformers"):
        loaded.as_transformers()


def test_an_architecture_that_does_not_fit_the_config(saved: Path) -> None:
    loaded = ExportedModel.from_pretrained(_changed(saved, architecture="T5ForConditionalGeneration"))
    with pytest.raises(
        ArtifactError, match="can't build T5ForConditionalGeneration from the export's config"
    ):
        loaded.generate(torch.tensor([[1]]))


@pytest.mark.parametrize("path", ["model.nothing", "model..layers", "config", "model.layers.7", "forward"])
@pytest.mark.parametrize("where", ["host", "modules"])
def test_modules_that_the_model_lacks(saved: Path, path: str, where: str) -> None:
    value: Any = path if where == "host" else {"embed_tokens": path}
    loaded = ExportedModel.from_pretrained(_changed(saved, **{where: value}))
    with pytest.raises(ArtifactError, match=r"names a module .* which LlamaForCausalLM doesn't have"):
        loaded.as_transformers()


def test_components_that_are_missing(make: Make) -> None:
    with pytest.raises(ArtifactError, match="lacks the component 'decode', which its generation needs"):
        make(components=("embed_tokens",)).as_transformers()
    with pytest.raises(ArtifactError, match=r"lacks the component 'embed_tokens'.*It has: decode"):
        make(components=("decode",)).as_transformers()
    one_token = GenerationRecord(architecture="LlamaForCausalLM", steps=["prefill", "decode"])
    with pytest.raises(ArtifactError, match="lacks the component 'prefill'"):
        make(one_token, components=("decode",)).as_transformers()


def test_an_attention_that_is_none(saved: Path) -> None:
    loaded = ExportedModel.from_pretrained(_changed(saved, attn_implementation={"": "evil/kernel"}))
    with pytest.raises(ArtifactError, match="can't build LlamaForCausalLM"):
        loaded.as_transformers()


def test_no_config(saved: Path) -> None:
    (saved / "config.json").unlink()
    with pytest.raises(ArtifactError, match="has no config"):
        ExportedModel.from_pretrained(saved).as_transformers()


# ── leftovers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_leftovers_are_missing(saved: Path) -> None:
    (saved / LEFTOVERS).unlink()
    with pytest.raises(ArtifactError, match=f"lacks the file '{LEFTOVERS}'"):
        ExportedModel.from_pretrained(saved)


def test_leftovers_are_cut_short(saved: Path) -> None:
    content = (saved / LEFTOVERS).read_bytes()
    (saved / LEFTOVERS).write_bytes(content[:-3])
    with pytest.raises(ArtifactError, match="truncated or was replaced"):
        ExportedModel.from_pretrained(saved)


def test_leftovers_are_others(saved: Path) -> None:
    content = bytearray((saved / LEFTOVERS).read_bytes())
    content[-1] ^= 1
    (saved / LEFTOVERS).write_bytes(content)
    with pytest.raises(ArtifactError, match="SHA-256 sum differs"):
        ExportedModel.from_pretrained(saved)


def _without_sums(folder: Path, **values: Any) -> None:
    path = folder / "export.json"
    document = json.loads(path.read_text())
    document["leftovers"] = {"name": LEFTOVERS, **values}
    path.write_text(json.dumps(document))


def test_leftovers_that_are_no_tensors(saved: Path) -> None:
    (saved / LEFTOVERS).write_bytes(b"\x80\x04 a pickle, or anything")
    _without_sums(saved)
    with pytest.raises(ArtifactError, match=f"{LEFTOVERS} can't be read"):
        ExportedModel.from_pretrained(saved)


@pytest.mark.parametrize("name", ["../leftovers.safetensors", "/etc/passwd", "", ".hidden", 3, None])
def test_leftovers_elsewhere(saved: Path, name: Any) -> None:
    _without_sums(saved, name=name)
    with pytest.raises(ArtifactError, match=r"plain names|lists a file of 'the leftovers' wrongly"):
        ExportedModel.from_pretrained(saved)


@pytest.mark.parametrize("value", ["leftovers.safetensors", [], 3], ids=str)
def test_leftovers_that_are_no_file(saved: Path, value: Any) -> None:
    path = saved / "export.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "leftovers": value}))
    with pytest.raises(ArtifactError, match="lists a file of 'the leftovers' wrongly"):
        ExportedModel.from_pretrained(saved)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.norm.secret", "holds a tensor 'model.norm.secret', which the model doesn't have"),
        ("model.norm.__class__", "holds a tensor"),
        ("model.norm.forward", "holds a tensor"),
        ("nowhere.weight", "names a module 'nowhere'"),
        ("config.weight", "names a module 'config'"),
    ],
)
def test_leftovers_with_other_tensors(saved: Path, name: str, message: str) -> None:
    tensors = load_file(saved / LEFTOVERS)
    save_file({name: tensors["model.norm.weight"]}, saved / LEFTOVERS)
    _without_sums(saved)
    with pytest.raises(ArtifactError, match=message):
        ExportedModel.from_pretrained(saved).as_transformers()


# ── what is recorded ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_attention_that_a_config_asks_for() -> None:
    from transformers import LlavaConfig

    config = LlavaConfig()
    config._attn_implementation = {"": "sdpa", "text_config": "eager"}  # type: ignore[assignment]
    found = attention_of(config)
    assert found[""] == "sdpa"
    assert found["text_config"] == "eager"


def test_tensors_that_no_component_covers(tiny_llama: Any) -> None:
    layers = Plan(host="model.layers.1", modules={"first": "model.layers.0", "head": "lm_head"}, split=False)
    assert set(uncovered_tensors(tiny_llama, layers)) == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.rotary_emb.inv_freq",
        "model.rotary_emb.original_inv_freq",
    }
    assert not uncovered_tensors(tiny_llama, Plan(host="", modules={}, split=False))


def test_a_name_that_begins_like_a_component_is_not_inside_it() -> None:
    model = torch.nn.ModuleDict({"vision": torch.nn.Linear(1, 1), "vision_norm": torch.nn.Linear(1, 1)})
    plan = Plan(host="vision", modules={}, split=False)
    assert set(uncovered_tensors(model, plan)) == {"vision_norm.weight", "vision_norm.bias"}
