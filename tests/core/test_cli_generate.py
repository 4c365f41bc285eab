"""`polyport generate`, and what the other commands say to an export that generates. A model itself stands in for a backend."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig
from typer.testing import CliRunner

from polyport import ExportedModel
from polyport.cli.app import app
from polyport.generation.record import GenerationRecord

MakeExport = Callable[..., ExportedModel]
RUN = CliRunner()
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}answer{% endif %}"
REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"


def call(*arguments: str | Path, stdin: str | None = None) -> Any:
    return RUN.invoke(app, [str(argument) for argument in arguments], input=stdin, env={"COLUMNS": "160"})


def tokenizer(template: str | None = TEMPLATE) -> Any:
    words = ["<pad>", "</s>", "<unk>", "user", "system", "answer", "hello", "world", "be", "brief"]
    words += [f"w{index}" for index in range(64 - len(words))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", eos_token="</s>"
    )
    made.chat_template = template
    return made


@pytest.fixture
def make(
    make_export: MakeExport, tiny_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """Save an export that generates, and have the model itself answer for it."""
    monkeypatch.setattr(ExportedModel, "as_transformers", lambda _: tiny_llama)

    def saved(processor: Any = None, *, static: int | None = None, many: bool = False) -> Path:
        record = GenerationRecord(
            architecture="LlamaForCausalLM", static=static is not None, multi_token_decode=many
        )
        config = GenerationConfig(
            eos_token_id=1,
            pad_token_id=0,
            max_cache_len=static,
            cache_implementation=None if static is None else "static",
        )
        exported = make_export(
            components=("prefill", "decode"),
            generation=record,
            config=tiny_llama.config,
            generation_config=config,
            leftovers={"model.norm.weight": torch.ones(32)},
        )
        exported.save_pretrained(tmp_path / "saved", processor)
        return tmp_path / "saved"

    return saved


def answers(folder: Path, *arguments: str | Path, stdin: str | None = None) -> list[dict[str, Any]]:
    result = call("generate", folder, *arguments, "--json", "-q", stdin=stdin)
    assert result.exit_code == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)["answers"]
    return found


# ── answering ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_text_is_streamed_and_the_counts_are_on_stderr(make: Any) -> None:
    result = call("generate", make(tokenizer()), "--prompt", "hello world", "--max-new-tokens", "5")
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.split()) == 5
    assert "4 prompt tokens, 5 new tokens" in result.stderr
    assert "tokens/s" in result.stderr
    quiet = call("generate", make(tokenizer()), "-p", "hello world", "--max-new-tokens", "5", "--quiet")
    assert quiet.stdout == result.stdout
    assert quiet.stderr == ""
    debugged = call("generate", make(tokenizer()), "-p", "hello world", "--max-new-tokens", "5", "--debug")
    assert debugged.stdout == result.stdout


def test_text_is_written_while_it_comes(make: Any, tiny_llama: Any) -> None:
    """When the model makes a token, the words before it have been written."""
    written: list[int] = []

    def look(*_: Any) -> None:
        stream = sys.stdout.real  # type: ignore[attr-defined]
        written.append(len(stream.buffer.getvalue()))

    handle = tiny_llama.register_forward_pre_hook(look)
    try:
        call("generate", make(tokenizer()), "-p", "hello", "--max-new-tokens", "6", "-q")
    finally:
        handle.remove()
    assert len(written) == 6
    assert written[0] == 0 < written[2] < written[4]


def test_json_is_one_document(make: Any) -> None:
    result = call("generate", make(tokenizer()), "-p", "hello", "--max-new-tokens", "4", "--json")
    document = json.loads(result.stdout)
    (answer,) = document["answers"]
    assert answer["prompt"] == "hello"
    assert answer["prompt_tokens"] == document["prompt_tokens"] == 3
    assert answer["new_tokens"] == len(answer["token_ids"]) == document["new_tokens"] == 4
    assert answer["text"] == tokenizer().decode(answer["token_ids"], skip_special_tokens=True)
    assert 0 < document["seconds_to_first_token"] <= document["seconds"]


def test_the_chat_template_is_used_unless_it_is_not_wanted(make: Any) -> None:
    folder = make(tokenizer())
    chat, raw = answers(folder, "-p", "hello"), answers(folder, "-p", "hello", "--raw")
    told = answers(folder, "-p", "hello", "--system", "be brief")
    assert [one[0]["prompt_tokens"] for one in (chat, raw, told)] == [3, 1, 6]
    by_hand = answers(folder, "-p", "user hello answer", "--raw")
    assert chat[0]["token_ids"] == by_hand[0]["token_ids"]


def test_several_prompts_are_a_batch_that_is_padded_on_the_left(make: Any) -> None:
    folder = make(tokenizer())
    prompts = ("hello world", "hello", "be brief world hello")
    batch = answers(folder, *(word for prompt in prompts for word in ("-p", prompt)), "--max-new-tokens", "6")
    alone = [answers(folder, "-p", prompt, "--max-new-tokens", "6")[0] for prompt in prompts]
    assert batch == alone
    shown = call("generate", folder, "-p", "hello", "-p", "world", "--max-new-tokens", "3").stdout
    assert "[1] hello\n" in shown
    assert "[2] world\n" in shown


def test_padding_without_a_token_for_it(make: Any) -> None:
    without = tokenizer()
    without.pad_token = None
    folder = make(without)
    assert len(answers(folder, "-p", "hello", "-p", "hello world", "--max-new-tokens", "2")) == 2


def test_a_prompt_from_stdin(make: Any) -> None:
    folder = make(tokenizer())
    assert answers(folder, "-p", "-", stdin="hello world\n") == answers(folder, "-p", "hello world")


def test_beams_and_chance(make: Any) -> None:
    folder = make(tokenizer())
    assert (
        len(answers(folder, "-p", "hello", "--num-beams", "3", "--max-new-tokens", "4")[0]["token_ids"]) <= 4
    )
    chance = ("-p", "hello", "--sample", "--temperature", "9", "--top-k", "50", "--top-p", "0.99", "--seed")
    drawn = [answers(folder, *chance, seed)[0]["token_ids"] for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    shown = call("generate", folder, "-p", "hello", "--num-beams", "2", "--max-new-tokens", "4", "-q")
    assert len(shown.stdout.split()) == 4


# ── refusing ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing to answer. Give --prompt"),
        (("-p", ""), "A prompt is empty"),
        (("-p", "-", "-p", "-"), "Only one prompt can be read from stdin"),
        (("-p", "hello", "--top-k", "3", "--seed", "1"), "no use for --top-k and --seed"),
        (("-p", "hello", "--raw", "--system", "x"), "which --raw leaves out"),
        (("-p", "hello", "--image", "none.png"), "picture none.png can't be read"),
        (("-p", "hello", "--audio", "none.wav"), "sound none.wav can't be read"),
        (("-p", "hello", "--max-new-tokens", "0"), "--max-new-tokens"),
    ],
)
def test_it_refuses_in_words(make: Any, arguments: tuple[str, ...], words: str) -> None:
    result = call("generate", make(tokenizer()), *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_picture_for_a_model_that_only_reads(make: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    result = call("generate", make(tokenizer()), "-p", "hello", "--image", tmp_path / "a.png")
    assert result.exit_code == 2
    assert "takes no image with a prompt" in result.stderr


@pytest.mark.parametrize(
    ("template", "words"),
    [(REFUSING, "chat template can't take this (no system role)"), (None, "this model has none")],
)
def test_a_system_message_that_can_not_be_given(make: Any, template: str | None, words: str) -> None:
    result = call("generate", make(tokenizer(template)), "-p", "hello", "--system", "x")
    assert result.exit_code == 2
    assert words in result.stderr


def test_without_a_tokenizer(make: Any) -> None:
    result = call("generate", make(), "-p", "hello")
    assert result.exit_code == 2
    assert "no tokenizer beside the export" in result.stderr


def test_what_does_not_fit_into_a_static_cache(make: Any) -> None:
    folder = make(tokenizer(), static=5)
    assert answers(folder, "-p", "hello")[0]["new_tokens"] == 2
    asked = call("generate", folder, "-p", "hello", "--max-new-tokens", "4")
    assert asked.exit_code == 2
    assert "3 tokens and 4 new ones don't fit into the export's static cache of 5" in asked.stderr
    long = call("generate", folder, "-p", "hello hello hello world")
    assert long.exit_code == 2
    assert "The prompt's 6 tokens don't fit" in long.stderr


# ── the other commands ──────────────────────────────────────────────────────────────────────────────────────────────


def test_an_export_of_one_graph_can_not_generate(make_export: MakeExport, tmp_path: Path) -> None:
    make_export().save_pretrained(tmp_path / "one")
    result = call("generate", tmp_path / "one", "-p", "hello")
    assert result.exit_code == 2
    assert "was not exported for generation" in result.stderr
    assert "polyport export --generate" in result.stderr


def test_run_points_to_generate(make: Any) -> None:
    result = call("run", make(), "--input", "x=[[1, 2, 3]]")
    assert result.exit_code == 2
    assert "prefill, decode" in result.stderr
    assert "polyport generate" in result.stderr


def test_inspect_shows_how_it_generates(make: Any) -> None:
    folder = make(static=8, many=True)
    result = call("inspect", folder)
    assert result.exit_code == 0, result.stderr
    for words in ("any number of tokens", "of a fixed size", "leftovers.safetensors", "the model itself"):
        assert words in result.stdout
    document = json.loads(call("inspect", folder, "--json").stdout)
    assert document["generation"]["static"]
    names = {"prefill.fake", "decode.fake", "leftovers.safetensors"}
    assert document["bytes"] == sum((folder / name).stat().st_size for name in names)
    assert document["leftovers"]["name"] == "leftovers.safetensors"


def test_options_of_generation_need_it(fake_backend: str, tmp_path: Path) -> None:
    arguments = ("export", "m", "--to", "fake", "-o", tmp_path / "x")
    result = call(*arguments, "--multi-token-decode", "--static-cache", "9")
    assert result.exit_code == 2
    assert "Add --generate" in result.stderr
    assert "--multi-token-decode and --static-cache" in result.stderr
    fixed = call(*arguments, "--generate", "--static")
    assert fixed.exit_code == 2
    assert "give --static-cache N" in fixed.stderr


def test_a_model_that_can_not_generate(fake_backend: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8)
    transformers.ViTModel(config).save_pretrained(tmp_path / "vit")
    result = call("export", tmp_path / "vit", "--to", "fake", "-o", tmp_path / "x", "--generate")
    assert result.exit_code == 2
    assert "can't generate" in result.stderr
    assert not (tmp_path / "x").exists()
