"""The command line from a model on disk to answers: `export --generate`, then `generate`, against the model itself."""

from __future__ import annotations

import json
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from typer.testing import CliRunner

from polyport.cli.app import app

FORMATS = ("onnx", "dynamo", "openvino")
TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0, "max_position_embeddings": 256,
}  # fmt: skip
WHISPER = {
    "vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 8,
    "max_source_positions": 50, "max_target_positions": 60, "decoder_start_token_id": 2, "pad_token_id": 0,
    "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %} {{ m.role }} {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %} answer{% endif %}"
)
PROMPTS = ("hello world", "what is the time", "hello")
RUN = CliRunner()


def call(*arguments: str | Path, stdin: str | None = None) -> Any:
    return RUN.invoke(app, [str(argument) for argument in arguments], input=stdin, env={"COLUMNS": "160"})


def tokenizer() -> Any:
    words = [
        "<pad>",
        "<unk>",
        "<s>",
        "</s>",
        "user",
        "system",
        "answer",
        "hello",
        "world",
        "what",
        "is",
        "the",
    ]
    words += [f"w{index}" for index in range(64 - len(words))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def export(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("exports") / "llama"
    formats = (word for name in FORMATS for word in ("--to", name))
    result = call("export", model, *formats, "--generate", "-o", out, "--json")
    assert result.exit_code == 0, result.stderr
    return out, result


@pytest.fixture(scope="module")
def static(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exports") / "static"
    result = call("export", model, "--to", "onnx", "--generate", "--static-cache", "48", "-o", out)
    assert result.exit_code == 0, result.stderr
    return out


def expected(folder: Path, *prompts: str, count: int, **options: Any) -> list[list[int]]:
    """The tokens that the model itself answers each prompt with."""
    original = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    reader = tokenizer()
    answers = []
    for prompt in prompts:
        chat = reader.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        made = original.generate(**chat, max_new_tokens=count, do_sample=False, **options)
        answers.append(made[0, chat["input_ids"].shape[1] :].tolist())
    return answers


def answered(folder: Path, *arguments: str | Path) -> list[list[int]]:
    result = call("generate", folder, *arguments, "--json", "-q")
    assert result.exit_code == 0, result.stderr
    return [answer["token_ids"] for answer in json.loads(result.stdout)["answers"]]


# ── exporting ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_component_is_announced_and_traced_once(export: tuple[Path, Any]) -> None:
    out, result = export
    document = json.loads(result.stdout)
    stages = [stage["stage"] for stage in document["stages"]]
    assert stages.index("Watching the model generate") < stages.index("Tracing LlamaForCausalLM")
    assert [stage for stage in stages if stage.startswith("Tracing")] == [
        "Tracing LlamaForCausalLM",
        "Tracing LlamaForCausalLM's decode",
    ]
    for one in document["exports"]:
        assert one["components"] == ["prefill", "decode"]
        assert one["verification"]["passed"]
        assert [case["name"] for case in one["verification"]["cases"]] == ["answer", "left padding"]
        assert one["bytes"] == sum(
            (Path(one["directory"]) / file["name"]).stat().st_size for file in one["files"]
        )
        assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= {
            path.name for path in (out / one["format"]).iterdir()
        }


def test_a_model_saved_without_its_head_is_exported_with_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TEXT, tie_word_embeddings=True)
    transformers.LlamaModel(config).save_pretrained(tmp_path / "base")
    result = call("export", tmp_path / "base", "--to", "onnx", "--generate", "-o", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["architecture"] == "LlamaForCausalLM"


def write_gguf(path: Path) -> None:
    """A tiny random Llama, with a tokenizer of single letters."""
    gguf = pytest.importorskip("gguf")
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = ["<unk>", "<s>", "</s>", *letters, "Ġ", "ab"]
    words += [f"w{index}" for index in range(64 - len(words))]
    file = gguf.GGUFWriter(str(path), "llama")
    file.add_context_length(64)
    file.add_embedding_length(32)
    file.add_block_count(1)
    file.add_feed_forward_length(32)
    file.add_head_count(4)
    file.add_head_count_kv(2)
    file.add_rope_dimension_count(8)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_vocab_size(64)
    file.add_tokenizer_model("gpt2")
    file.add_token_list(words)
    file.add_token_types([3, 3, 3] + [1] * 61)
    file.add_token_merges(["a b"])
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    shapes = {
        "token_embd": (64, 32), "output": (64, 32), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (32, 32), "blk.0.ffn_up": (32, 32),
        "blk.0.ffn_down": (32, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,),
    }  # fmt: skip
    numbers = np.random.default_rng(0)
    for name, shape in shapes.items():
        weight = numbers.normal(size=shape, scale=0.2).astype(np.float32) + (len(shape) == 1)
        if len(shape) == 2:
            packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
            file.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            file.add_tensor(f"{name}.weight", weight)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def test_a_gguf_file_is_dequantized(tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    write_gguf(tmp_path / "gguf" / "tiny.gguf")
    arguments = ("export", tmp_path / "gguf", "--gguf-file", "tiny.gguf", "--to", "onnx", "--generate")
    result = call(*arguments, "-o", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["architecture"] == "LlamaForCausalLM"
    assert document["exports"][0]["verification"]["passed"]
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gguf", gguf_file="tiny.gguf")
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "gguf", gguf_file="tiny.gguf")
    prompt = reader("abc", return_tensors="pt", return_token_type_ids=False)
    wanted = original.generate(**prompt, max_new_tokens=5, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert answered(tmp_path / "out", "-p", "abc", "--max-new-tokens", "5") == [wanted.tolist()]


# ── answering ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", FORMATS)
def test_it_answers_as_the_model_does(export: tuple[Path, Any], model: Path, name: str) -> None:
    folder = export[0] / name
    wanted = expected(model, *PROMPTS, count=8)
    assert answered(folder, "-p", PROMPTS[0], "--max-new-tokens", "8") == wanted[:1]
    batch = (word for prompt in PROMPTS for word in ("-p", prompt))
    assert answered(folder, *batch, "--max-new-tokens", "8") == wanted
    beams = answered(folder, "-p", PROMPTS[1], "--max-new-tokens", "6", "--num-beams", "3")
    assert beams == expected(model, PROMPTS[1], count=6, num_beams=3)


def test_text_is_streamed(export: tuple[Path, Any], model: Path) -> None:
    result = call("generate", export[0] / "onnx", "-p", "-", "--max-new-tokens", "8", stdin="hello world\n")
    assert result.exit_code == 0, result.stderr
    (wanted,) = expected(model, "hello world", count=8)
    assert result.stdout.strip() == tokenizer().decode(wanted, skip_special_tokens=True).strip()
    assert "5 prompt tokens, 8 new tokens" in result.stderr


def test_chance_can_be_repeated(export: tuple[Path, Any]) -> None:
    chance = ("-p", "hello", "--sample", "--temperature", "5", "--top-k", "40", "--top-p", "0.95", "--seed")
    drawn = [answered(export[0] / "onnx", *chance, seed) for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_static_cache_and_what_does_not_fit(static: Path, model: Path) -> None:
    assert answered(static, "-p", "hello world", "--max-new-tokens", "8") == expected(
        model, "hello world", count=8
    )
    (filled,) = answered(static, "-p", "hello world")
    assert len(filled) <= 48 - 5
    too_many = call("generate", static, "-p", "hello world", "--max-new-tokens", "44")
    assert too_many.exit_code == 2
    assert "don't fit into the export's static cache of 48" in too_many.stderr
    too_long = call("generate", static, "-p", "hello " * 60)
    assert too_long.exit_code == 2
    assert "The prompt's 63 tokens don't fit" in too_long.stderr


def test_any_number_of_tokens_at_once(model: Path, tmp_path: Path) -> None:
    arguments = ("export", model, "--to", "dynamo", "--generate", "--multi-token-decode")
    result = call(*arguments, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert answered(tmp_path / "out", "-p", PROMPTS[1], "--max-new-tokens", "6") == expected(
        model, PROMPTS[1], count=6
    )
    shown = call("inspect", tmp_path / "out").stdout
    assert "any number of tokens" in shown
    assert "prefill" not in shown


def test_sound_needs_no_prompt(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whisper = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER))
    whisper.generation_config.no_timestamps_token_id = 40
    whisper.generation_config._from_model_config = False
    whisper.save_pretrained(tmp_path / "whisper")
    transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(tmp_path / "whisper")
    tokenizer().save_pretrained(tmp_path / "whisper")
    result = call("export", tmp_path / "whisper", "--to", "onnx", "--generate", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    for seconds, name in ((0.5, "short.wav"), (2.2, "long.wav")):
        with wave.open(str(tmp_path / name), "wb") as file:
            file.setparams((1, 2, 16_000, 0, "NONE", ""))
            file.writeframes((np.sin(np.arange(int(16_000 * seconds)) / 20) * 9000).astype("<i2").tobytes())
    (short,) = answered(tmp_path / "out", "--audio", tmp_path / "short.wav", "--max-new-tokens", "5")
    (long,) = answered(tmp_path / "out", "--audio", tmp_path / "long.wav", "--max-new-tokens", "5")
    assert len(short) == 5
    assert len(long) > 5, "only the first second was heard"
    silent = call("generate", tmp_path / "out")
    assert "nothing to answer. Give --audio" in silent.stderr
    asked = call("generate", tmp_path / "out", "-p", "hello")
    assert "reads no prompt" in asked.stderr


def test_as_a_process(export: tuple[Path, Any], model: Path) -> None:
    arguments = ["generate", str(export[0] / "onnx"), "-p", "hello", "--max-new-tokens", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "polyport.cli", *arguments], capture_output=True, text=True, check=True
    )
    (wanted,) = expected(model, "hello", count=4)
    assert done.stdout == tokenizer().decode(wanted, skip_special_tokens=True) + "\n"
    assert "4 new tokens" in done.stderr
