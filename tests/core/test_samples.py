"""Loading models, making sample inputs and reading inputs: `polyport.samples`. No backend, no network."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from polyport.errors import ConfigError, ExportError, InputError
from polyport.samples import (
    Processors,
    check_source,
    decoder_start,
    fit_inputs,
    load_model,
    load_processors,
    media,
    prompt_inputs,
    read_inputs,
    sample_inputs,
)
from polyport.samples.tasks import auto_class, generating_tasks, task_of, tasks

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
TEXT_SIZES = {**SIZES, "vocab_size": 60}
VISION = {**SIZES, "image_size": 16, "patch_size": 8}
T5 = {
    "vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0,
}  # fmt: skip
CLIP = {"text_config": {**TEXT_SIZES, "eos_token_id": 2}, "vision_config": VISION, "projection_dim": 8}
WAV2VEC2 = {**TEXT_SIZES, "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2}  # fmt: skip
WHISPER = {
    "vocab_size": 60, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 8,
    "max_source_positions": 20, "max_target_positions": 20, "decoder_start_token_id": 1, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tiny(class_name: str, **config: Any) -> Any:
    torch.manual_seed(0)
    cls = getattr(transformers, class_name)
    return cls(cls.config_class(**config)).eval()


def tokenizer(*more: str) -> Any:
    words = ["[PAD]", "[UNK]", "hello", ",", "world", "!", *more]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        additional_special_tokens=list(more) or None,
    )


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    folder = tmp_path / "bert"
    tiny("BertForSequenceClassification", **TEXT_SIZES).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


# ── tasks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_auto_class_is_a_task() -> None:
    from transformers.models.auto import modeling_auto

    named = {cls for classes in tasks().values() for cls in classes}
    assert {name for name in vars(modeling_auto) if name.startswith("AutoModelFor")} <= named
    assert {"causal-lm", "seq2seq-lm", "text-generation", "ctc", "image-classification"} <= tasks().keys()


@pytest.mark.parametrize(
    ("class_name", "config", "task"),
    [
        ("BertModel", TEXT_SIZES, "feature-extraction"),
        ("BertForSequenceClassification", TEXT_SIZES, "text-classification"),
        ("T5ForConditionalGeneration", T5, "text2text-generation"),
        ("ViTForImageClassification", VISION, "image-classification"),
        ("WhisperForConditionalGeneration", WHISPER, "automatic-speech-recognition"),
        ("BertForPreTraining", TEXT_SIZES, None),
    ],
)
def test_the_task_of_a_model_comes_from_its_class(
    class_name: str, config: dict[str, Any], task: str | None
) -> None:
    assert task_of(tiny(class_name, **config)) == task


def test_an_unknown_task_lists_the_valid_ones() -> None:
    with pytest.raises(ExportError, match=r"Did you mean 'fill-mask'\?.*feature-extraction"):
        auto_class("fillmask", transformers.BertConfig())


def test_a_task_the_model_has_no_head_for_lists_the_ones_it_has() -> None:
    with pytest.raises(ExportError, match=r"'bert' have no head for the task 'object-detection'.*fill-mask"):
        auto_class("object-detection", transformers.BertConfig())


@pytest.mark.parametrize(
    ("config", "first"),
    [
        (transformers.LlamaConfig(), "text-generation"),
        (transformers.BartConfig(), "text2text-generation"),
        (transformers.WhisperConfig(), "automatic-speech-recognition"),
        (transformers.LlavaConfig(), "image-text-to-text"),
        (transformers.ViTConfig(), None),
    ],
)
def test_what_models_generate_for(config: Any, first: str | None) -> None:
    assert next(iter(generating_tasks(config)), None) == first


# ── loading ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_model_loads_as_the_class_it_was_saved_from(bert: Path) -> None:
    model, task = load_model(bert)
    assert type(model).__name__ == "BertForSequenceClassification"
    assert task == "text-classification"
    assert not model.training


def test_task_and_dtype_are_obeyed_and_random_weights_are_announced(bert: Path) -> None:
    with pytest.warns(UserWarning, match=r"no weights for cls\.predictions.*random values"):
        model, task = load_model(bert, "masked-lm", dtype="bf16")
    assert type(model).__name__ == "BertForMaskedLM"
    assert task == "masked-lm"
    assert model.dtype == torch.bfloat16


def test_an_architecture_can_be_asked_for_by_its_class(bert: Path) -> None:
    model, _ = load_model(bert, architecture="BertModel")
    assert type(model).__name__ == "BertModel"
    with pytest.raises(ExportError, match="of type 'bert', which is none of the class ViTModel"):
        load_model(bert, architecture="ViTModel")


def test_an_unknown_dtype_is_a_config_error(bert: Path) -> None:
    with pytest.raises(ConfigError, match=r"no dtype 'int3'.*bfloat16"):
        load_model(bert, dtype="int3")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"holds no config\.json"),
        ({"a.gguf": ""}, "GGUF"),
        ({"export.json": "{}"}, "is an export already"),
        ({"adapter_config.json": "{}"}, "adapter: merge it"),
        ({"onnx/config.json": "{}"}, "subfolders onnx do"),
        ({"config.json": "{"}, "not a valid JSON"),
        ({"config.json": {}}, r"config\.json of .* is empty"),
        ({"config.json": {"a": 1}}, "names no model_type"),
        ({"config.json": {"model_type": "zzz"}}, "has no model_type 'zzz'"),
        ({"config.json": {"model_type": "zzz", "auto_map": {"AutoConfig": "a.B"}}}, "--trust-remote-code"),
        (
            {"config.json": {"model_type": "bert", "architectures": ["FooForBar"]}},
            "class FooForBar.*--task: feature",
        ),
        (
            {"config.json": {"model_type": "bert", "quantization_config": {"quant_method": "awq"}}},
            r"quantized.*\(awq\)",
        ),
        (
            {"config.json": {"model_type": "bert", "architectures": ["BertModel"], **TEXT_SIZES}},
            "weights .*missing",
        ),
    ],
)
def test_what_is_no_checkpoint_is_refused_in_words(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ExportError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "no folder './nowhere'"),
        ("a/b/c", "no folder"),
        ("x.gguf", "GGUF file"),
        (__file__, "is a file"),
    ],
)
def test_what_can_be_no_hub_id_is_refused_before_the_network_is_asked(name: str, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        check_source(name)


def test_a_model_that_is_not_on_disk_and_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ExportError, match="no folder 'polyport/nothing', and the Hub can't be reached"):
        load_model("polyport/nothing")


def test_damaged_weights_are_named(bert: Path) -> None:
    (bert / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ExportError, match=r"weights of .*bert could not be loaded"):
        load_model(bert)


def test_weights_of_another_model_are_refused(bert: Path) -> None:
    save_file({"nothing": torch.zeros(1)}, bert / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match="None of the weights"):
        load_model(bert)


LLAMA = {**TEXT_SIZES, "num_key_value_heads": 2}


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_without_a_head_generates_where_its_weights_are_all_there(
    tmp_path: Path, tied: bool
) -> None:
    tiny("LlamaModel", **LLAMA, tie_word_embeddings=tied).save_pretrained(tmp_path)
    if tied:
        model, task = load_model(tmp_path, generates=True)
        assert (type(model).__name__, task) == ("LlamaForCausalLM", "text-generation")
    else:
        with pytest.raises(ExportError, match=r"LlamaForCausalLM: its checkpoint has no weights for lm_head"):
            load_model(tmp_path, generates=True)


def test_another_head_is_not_taken_for_one_that_generates(bert: Path) -> None:
    with pytest.raises(ExportError, match=r"BertForSequenceClassification.*can't generate.*text-generation"):
        load_model(bert, generates=True)
    with pytest.raises(ExportError, match=r"BertModel, the class .* can't generate"):
        load_model(bert, "feature-extraction", generates=True)


def test_a_gguf_file_that_is_missing_or_none(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"nothing")
    with pytest.raises(ExportError, match=r"holds no b\.gguf\. Its GGUF files: a\.gguf"):
        load_model(tmp_path, gguf_file="b.gguf")
    with pytest.raises(ExportError, match=r"no GGUF file that can be read|package that is not installed"):
        load_model(tmp_path, gguf_file="a.gguf")


# ── sample inputs ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("class_name", "config", "names"),
    [
        ("BertModel", TEXT_SIZES, {"input_ids", "attention_mask"}),
        ("BertForMultipleChoice", TEXT_SIZES, {"input_ids", "attention_mask"}),
        (
            "GPT2LMHeadModel",
            {"vocab_size": 60, "n_embd": 16, "n_layer": 1, "n_head": 2},
            {"input_ids", "attention_mask"},
        ),
        ("T5ForConditionalGeneration", T5, {"input_ids", "attention_mask", "decoder_input_ids"}),
        (
            "BartForSequenceClassification",
            {k: v for k, v in WHISPER.items() if "ma" not in k},
            {"input_ids", "attention_mask"},
        ),
        ("ViTModel", VISION, {"pixel_values"}),
        ("CLIPModel", CLIP, {"input_ids", "attention_mask", "pixel_values"}),
        ("Wav2Vec2ForCTC", WAV2VEC2, {"input_values"}),
        ("WhisperForConditionalGeneration", WHISPER, {"input_features", "decoder_input_ids"}),
        ("VideoMAEModel", {**VISION, "num_frames": 2}, {"pixel_values"}),
        ("ASTModel", {**SIZES, "num_mel_bins": 16, "max_length": 24}, {"input_values"}),
    ],
)
def test_inputs_from_the_config_alone_are_such_that_the_model_runs(
    tmp_path: Path, class_name: str, config: dict[str, Any], names: set[str]
) -> None:
    model = tiny(class_name, **config)
    inputs, processor = sample_inputs(model, tmp_path, task_of(model))
    assert processor is None
    assert inputs.keys() == names
    again, _ = sample_inputs(model, tmp_path, task_of(model))
    assert all(torch.equal(again[name], value) for name, value in inputs.items())
    with torch.no_grad():
        model(**inputs)


def test_inputs_follow_the_dtype_of_the_model(tmp_path: Path) -> None:
    inputs, _ = sample_inputs(tiny("ViTModel", **VISION).to(torch.bfloat16), tmp_path)
    assert inputs["pixel_values"].dtype == torch.bfloat16


def test_a_model_whose_config_says_too_little_asks_for_inputs(tmp_path: Path) -> None:
    model = tiny("PatchTSTModel", num_hidden_layers=1, d_model=8, num_attention_heads=2, ffn_dim=8)
    with pytest.raises(ExportError, match=r"PatchTSTModel.*past_values.*--input"):
        sample_inputs(model, tmp_path)


def test_a_multimodal_prompt_without_processor_is_refused(tmp_path: Path) -> None:
    config = {"text_config": {**TEXT_SIZES, "model_type": "llama"}, "image_token_id": 9,
              "vision_config": {**VISION, "model_type": "clip_vision_model"}}  # fmt: skip
    with pytest.raises(ExportError, match="placeholders"):
        sample_inputs(tiny("LlavaForConditionalGeneration", **config), tmp_path)


def test_text_goes_through_the_models_own_tokenizer(bert: Path) -> None:
    model, task = load_model(bert)
    inputs, processor = sample_inputs(model, bert, task)
    assert isinstance(processor, transformers.PreTrainedTokenizerBase)
    assert inputs["input_ids"].tolist() == processor([media.TEXT])["input_ids"]
    rows, _ = sample_inputs(model, bert, task, text=["hello", "hello world !"])
    assert rows["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]


def test_a_folder_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    tiny("BertModel", **TEXT_SIZES).save_pretrained(tmp_path)  # transformers would make an empty one here
    assert load_processors(tmp_path).single() is None


def test_sound_goes_through_the_feature_extractor(tmp_path: Path) -> None:
    transformers.Wav2Vec2FeatureExtractor(sampling_rate=8000).save_pretrained(tmp_path)
    model = tiny("Wav2Vec2ForCTC", **WAV2VEC2)
    inputs, processor = sample_inputs(model, tmp_path)
    assert inputs["input_values"].shape == (1, 8000)
    assert processor.sampling_rate == 8000


def test_pictures_and_text_go_through_the_processor(tmp_path: Path) -> None:
    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    transformers.CLIPProcessor(transformers.CLIPImageProcessor(**sizes), tokenizer()).save_pretrained(
        tmp_path
    )
    inputs, processor = sample_inputs(tiny("CLIPModel", **CLIP), tmp_path)
    assert isinstance(processor, transformers.CLIPProcessor)
    assert inputs["pixel_values"].shape == (1, 3, 16, 16)
    assert inputs.keys() == {"input_ids", "attention_mask", "pixel_values"}


def test_a_multimodal_prompt_gets_the_processors_own_placeholder(tmp_path: Path) -> None:
    sizes = {"size": {"height": 16, "width": 16}, "crop_size": {"height": 16, "width": 16}}
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(**sizes), tokenizer("<image>"), patch_size=8, image_token="<image>",
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip
    processor.save_pretrained(tmp_path)
    loaded = load_processors(tmp_path)
    made = loaded(text=["hello"], images=[media.as_image(media.picture())])
    assert made["input_ids"].tolist() == [[6, 6, 6, 6, 2]]


def test_a_tokenizer_and_an_image_processor_without_a_processor_are_saved_together(tmp_path: Path) -> None:
    both = Processors(
        tokenizer=tokenizer(),
        image_processor=transformers.ViTImageProcessor(size={"height": 16, "width": 16}),
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vision-encoder-decoder"}))
    both.single().save_pretrained(tmp_path)
    found = load_processors(tmp_path)
    assert found.tokenizer is not None
    assert found.image_processor is not None


def test_a_tokenizer_that_does_not_load_is_announced_and_the_config_serves(bert: Path) -> None:
    model, task = load_model(bert)
    (bert / "tokenizer.json").write_text("{}")
    with pytest.warns(UserWarning, match="can't be loaded.*made from the config"):
        inputs, processor = sample_inputs(model, bert, task)
    assert processor is None
    assert inputs.keys() == {"input_ids", "attention_mask"}
    with pytest.raises(ExportError, match="can't be loaded"):
        sample_inputs(model, bert, task, text=["hello"])


def test_what_no_processor_takes_is_refused(bert: Path) -> None:
    with pytest.raises(InputError, match=r"pictures.*--input"):
        sample_inputs(load_model(bert)[0], bert, images=[media.picture()])


def test_kwargs_that_forward_does_not_take_are_dropped() -> None:
    model = tiny("BertModel", **TEXT_SIZES)
    ids = torch.tensor([[1]])
    assert fit_inputs(model, {"input_ids": ids, "pixel_values": ids, "use_cache": False}).keys() == {
        "input_ids",
        "use_cache",
    }


def test_generation_says_what_a_decoder_begins_with() -> None:
    config = transformers.T5Config(**T5)
    assert decoder_start(config) == 0
    assert decoder_start(config, transformers.GenerationConfig(decoder_start_token_id=7)) == 7


# ── prompts ─────────────────────────────────────────────────────────────────────────────────────────────────────────

CHAT = (
    "{% for m in messages %}{{ m.role }} {% for c in m.content %}{% if c.type == 'image' %}<image> {% else %}{{ c.text }} "
    "{% endif %}{% endfor %}{% endfor %}"
)


def seeing(template: str | None = CHAT) -> Processors:
    """The processor of a model that reads text with pictures: two patches a picture."""
    pytest.importorskip("PIL")
    images = transformers.CLIPImageProcessor(
        size={"height": 8, "width": 16}, crop_size={"height": 8, "width": 16}
    )
    words = tokenizer("<image>", "user", "system")
    whole = transformers.LlavaProcessor(
        image_processor=images,
        tokenizer=words,
        patch_size=8,
        vision_feature_select_strategy="full",
        chat_template=template,
    )
    return Processors(whole=whole, tokenizer=whole.tokenizer, image_processor=whole.image_processor)


@pytest.mark.parametrize(("template", "raw", "user"), [(CHAT, False, 1), (CHAT, True, 0), (None, False, 0)])
def test_a_prompt_has_a_place_for_its_picture(template: str | None, raw: bool, user: int) -> None:
    processors = seeing(template)
    inputs = prompt_inputs(processors, ["hello"], images=[media.as_image(media.picture(40, 50))], raw=raw)
    words = processors.tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    assert (words.count("<image>"), words.count("user"), words.count("hello")) == (2, user, 1)
    assert inputs["pixel_values"].shape == (1, 3, 8, 16)


def test_pictures_are_shared_out_among_prompts_of_any_length() -> None:
    pictures = [media.as_image(media.picture(40, 50))] * 2
    inputs = prompt_inputs(seeing(), ["hello", "hello , world !"], images=pictures)
    assert inputs["pixel_values"].shape[0] == 2
    assert inputs["attention_mask"].tolist()[0] == [0, 0, 0, 1, 1, 1, 1]
    with pytest.raises(InputError, match="same number of image files: 2 can't be shared out among 3"):
        prompt_inputs(seeing(), ["a", "b", "c"], images=pictures)


def test_a_prompt_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(InputError, match="no tokenizer beside the export"):
        prompt_inputs(Processors(), ["hello"])


def test_all_of_a_long_sound_is_heard() -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    processors = Processors(tokenizer=tokenizer(), feature_extractor=extractor)
    short = prompt_inputs(processors, [], audio=[media.chirp(16_000, 0.5)])
    long = prompt_inputs(processors, [], audio=[media.chirp(16_000, 2.5)])
    assert short["input_features"].shape == (1, 8, 100)
    assert long["input_features"].shape == (1, 8, 250)
    assert long["return_timestamps"] is True


# ── media ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def write_wav(path: Path, samples: np.ndarray, rate: int, width: int = 2) -> None:
    scaled = np.round(samples * (2 ** (8 * width - 1) - 1)).astype("<i4")
    data = (scaled + 128).astype(np.uint8) if width == 1 else scaled[..., None].view(np.uint8)[..., :width]
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data.tobytes())


@pytest.mark.parametrize(("width", "tolerance"), [(1, 1e-2), (2, 1e-4), (3, 1e-6), (4, 1e-6)])
def test_wav_files_are_read_at_every_width(tmp_path: Path, width: int, tolerance: float) -> None:
    tone = media.chirp(8000, 0.1)
    write_wav(tmp_path / "a.wav", np.stack([tone, tone], axis=1), 8000, width)
    np.testing.assert_allclose(media.read_audio(tmp_path / "a.wav", 8000), tone, atol=tolerance)


def test_sound_is_mixed_and_resampled(tmp_path: Path) -> None:
    time = np.arange(4410) / 44100
    tone = 0.5 * np.sin(2 * np.pi * 440 * time)
    write_wav(tmp_path / "a.wav", np.stack([2 * tone - 0.2, np.full_like(tone, 0.2)], axis=1) / 2, 44100)
    read = media.read_audio(tmp_path / "a.wav", 16000)
    assert read.dtype == np.float32
    expected = 0.5 * 0.5 * np.sin(2 * np.pi * 440 * np.arange(1600) / 16000)
    np.testing.assert_allclose(read, expected, atol=1e-3)


@pytest.mark.parametrize("content", [None, b"", b"RIFFxxxx", b"no sound at all"])
def test_what_is_no_sound_is_an_input_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.wav"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"a\.wav"):
        media.read_audio(path, 16000)


def test_what_is_no_picture_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match="picture"):
        media.read_image(tmp_path / "a.png")


def test_the_built_in_picture_and_sound_have_structure() -> None:
    picture, sound = media.picture(60, 80), media.chirp(8000, 0.5)
    assert picture.shape == (60, 80, 3)
    assert picture.dtype == np.uint8
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 30
    assert sound.shape == (4000,)
    assert 0.4 < np.abs(sound).max() <= 0.5


# ── reading inputs ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_pairs_become_tensors_and_plain_values() -> None:
    read = read_inputs(
        ["input_ids=[[1, 2]]", "x=[0.5, 1]", "mask=[[true]]", "use_cache=false", "n=3", "labels=null"]
    )
    assert read["input_ids"].dtype == torch.int64
    assert read["x"].dtype == torch.float32
    assert read["mask"].dtype == torch.bool
    assert {name: read[name] for name in ("use_cache", "n", "labels")} == {
        "use_cache": False,
        "n": 3,
        "labels": None,
    }


def test_files_of_every_kind_give_the_same(tmp_path: Path) -> None:
    ids = torch.tensor([[1, 2, 3]])
    save_file({"input_ids": ids}, tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", input_ids=ids.numpy())
    np.save(tmp_path / "a.npy", ids.numpy())
    (tmp_path / "a.json").write_text(json.dumps({"input_ids": ids.tolist()}))
    for read in (
        read_inputs(file=tmp_path / "a.safetensors"),
        read_inputs(file=tmp_path / "a.npz"),
        read_inputs(file=tmp_path / "a.json"),
        read_inputs([f"input_ids=@{tmp_path / 'a.npy'}"]),
    ):
        assert read.keys() == {"input_ids"}
        assert torch.equal(read["input_ids"], ids)
    assert read_inputs(["input_ids=[[9]]"], tmp_path / "a.npz")["input_ids"].tolist() == [[9]]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("input_ids", "no name=value pair"),
        ("=[1]", "no name=value pair"),
        ("input_ids=[[1,2],[3]]", "no array of numbers"),
        ("input_ids=hello", r"not JSON.*--text"),
        ('input_ids="hello"', r"is text.*--text"),
        ('input_ids=["hello"]', "no array of numbers"),
        ('input_ids={"a": 1}', "is an object"),
        ("input_ids=@nowhere.npy", "No such file"),
        ("input_ids=@nowhere.pt", r"no \.npy or \.json file"),
        ("input_ids=[99999999999999999999]", "no array of numbers"),
        ("input_ids=" + "[" * 100_000, "not JSON"),
    ],
)
def test_a_pair_that_cannot_be_read_is_an_input_error(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_inputs([spec])


def test_an_input_given_twice_is_refused() -> None:
    with pytest.raises(InputError, match="'a' is given twice"):
        read_inputs(["a=1", "a=2"])


@pytest.mark.parametrize("name", ["a.safetensors", "a.npz", "a.json", "a.txt", "missing.npz"])
def test_a_file_that_cannot_be_read_is_an_input_error(tmp_path: Path, name: str) -> None:
    if not name.startswith("missing"):
        (tmp_path / name).write_bytes(b"\x00 garbage")
    with pytest.raises(InputError, match=name):
        read_inputs(file=tmp_path / name)


class Bomb:
    """Unpickling this leaves a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pickled_content_is_never_read(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    bomb = np.array([Bomb(trace)], dtype=object)
    np.save(tmp_path / "a.npy", bomb, allow_pickle=True)
    np.savez(tmp_path / "a.npz", a=bomb, allow_pickle=True)
    with pytest.raises(InputError, match="Python objects"):
        read_inputs([f"a=@{tmp_path / 'a.npy'}"])
    with pytest.raises(InputError, match="Python objects"):
        read_inputs(file=tmp_path / "a.npz")
    assert not trace.exists()
