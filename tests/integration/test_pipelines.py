"""Exports in the place of models in transformers' pipelines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, pipeline

from polyport import DynamoExporter, ExportedModel, OnnxExporter, OpenVINOExporter

sys.path.insert(0, str(Path(__file__).parents[1]))

import zoo

EXPORTERS = {"dynamo": DynamoExporter, "onnx": OnnxExporter, "openvino": OpenVINOExporter}

#: Words of the tokenizer; the zoo's token for an image is 100.
_WORDS = [f"w{number}" for number in range(128)]

formats = pytest.mark.parametrize("export_format", EXPORTERS)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    words.update({word: number for number, word in enumerate(_WORDS) if number > 3 and number != 100})
    words["<image>"] = 100
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )
    fast.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return fast


def _saved(exported: ExportedModel, tmp_path: Any) -> Any:
    exported.save_pretrained(tmp_path)
    return ExportedModel.from_pretrained(tmp_path).as_transformers()


def _generating(name: str, export_format: str, tmp_path: Any) -> tuple[Any, Any]:
    model, _, inputs = zoo.build(name)
    assert inputs is not None
    exported = EXPORTERS[export_format]().export_for_generation(model, inputs, {"dynamic": True})
    return model, _saved(exported, tmp_path)


def _one_graph(model: Any, inputs: Any, export_format: str, tmp_path: Any) -> Any:
    return _saved(EXPORTERS[export_format]().export(model, inputs, {"dynamic": True}), tmp_path)


@formats
def test_text_generation(export_format: str, tokenizer: Any, tmp_path: Any) -> None:
    model, ours = _generating("llama", export_format, tmp_path)
    texts = ["w5 w6 w7", "w9 w10 w11 w12 w13 w14 w15"]
    options = {"max_new_tokens": 8, "do_sample": False, "batch_size": 2}
    got = pipeline("text-generation", model=ours, tokenizer=tokenizer)(texts, **options)
    assert got == pipeline("text-generation", model=model, tokenizer=tokenizer)(texts, **options)
    assert isinstance(ours, type(model))


@formats
def test_feature_extraction(
    export_format: str, tokenizer: Any, tiny_bert: Any, token_ids: Any, tmp_path: Any
) -> None:
    ours = _one_graph(tiny_bert, token_ids(1, 4), export_format, tmp_path)
    texts = ["w5 w6 w7 w8", "w9"]
    got = pipeline("feature-extraction", model=ours, tokenizer=tokenizer)(texts)
    wanted = pipeline("feature-extraction", model=tiny_bert, tokenizer=tokenizer)(texts)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=0)


@formats
def test_text_classification(export_format: str, tokenizer: Any, tmp_path: Any) -> None:
    model, inputs, _ = zoo.build("bert")
    assert type(model).__name__.endswith("ForSequenceClassification")
    plain = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    ours = _one_graph(model, plain, export_format, tmp_path)
    texts = ["w5 w6 w7 w8", "w9 w10"]
    got = pipeline("text-classification", model=ours, tokenizer=tokenizer)(texts, top_k=None)
    wanted = pipeline("text-classification", model=model, tokenizer=tokenizer)(texts, top_k=None)
    for ours_of, theirs_of in zip(got, wanted, strict=True):
        assert [entry["label"] for entry in ours_of] == [entry["label"] for entry in theirs_of]
        np.testing.assert_allclose(
            [entry["score"] for entry in ours_of], [entry["score"] for entry in theirs_of], atol=1e-5, rtol=0
        )


@formats
def test_speech_recognition(export_format: str, tokenizer: Any, tmp_path: Any) -> None:
    from transformers import Wav2Vec2FeatureExtractor

    model, ours = _generating("moonshine", export_format, tmp_path)
    extractor = Wav2Vec2FeatureExtractor(
        feature_size=1, sampling_rate=16000, do_normalize=False, return_attention_mask=True
    )
    clip = np.random.default_rng(0).standard_normal(7000).astype(np.float32)
    parts = {"tokenizer": tokenizer, "feature_extractor": extractor}
    options = {"generate_kwargs": {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}}
    got = pipeline("automatic-speech-recognition", model=ours, **parts)(clip, **options)
    wanted = pipeline("automatic-speech-recognition", model=model, **parts)(clip, **options)
    assert got == wanted
    assert got["text"]


@formats
def test_image_classification(export_format: str, tmp_path: Any) -> None:
    from PIL import Image
    from transformers import ViTImageProcessorPil

    model, inputs, _ = zoo.build("vit")
    ours = _one_graph(model, inputs, export_format, tmp_path)
    processor = ViTImageProcessorPil(size={"height": 32, "width": 32})
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    got = pipeline("image-classification", model=ours, image_processor=processor)(Image.fromarray(pixels))
    wanted = pipeline("image-classification", model=model, image_processor=processor)(Image.fromarray(pixels))
    assert [entry["label"] for entry in got] == [entry["label"] for entry in wanted]
    np.testing.assert_allclose(
        [entry["score"] for entry in got], [entry["score"] for entry in wanted], atol=1e-5, rtol=0
    )


@formats
def test_image_text_to_text(export_format: str, tokenizer: Any, tmp_path: Any) -> None:
    from PIL import Image
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    model, ours = _generating("llava", export_format, tmp_path)
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        ),
        tokenizer=tokenizer,
        patch_size=16,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    call: dict[str, Any] = {
        "text": "<image> w5 w6",
        "images": [Image.fromarray(pixels)],
    }
    call["generate_kwargs"] = {"max_new_tokens": 8, "do_sample": False}
    got = pipeline("image-text-to-text", model=ours, processor=processor)(**call)
    wanted = pipeline("image-text-to-text", model=model, processor=processor)(**call)
    assert got == wanted
    assert got[0]["generated_text"]


def test_device_and_dtype_are_the_exports(tiny_llama: Any, token_ids: Any) -> None:
    ours = DynamoExporter().export(tiny_llama, token_ids(1, 4), {"dynamic": True}).as_transformers()
    assert ours.device == torch.device("cpu")
    assert ours.dtype == torch.float32
    assert ours.to("cpu") is ours
    assert all(weight.device.type == "meta" for weight in ours.parameters())
