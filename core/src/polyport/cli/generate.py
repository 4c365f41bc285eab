"""`polyport generate`: give an export a prompt and see what it answers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer
from rich.console import Console

from polyport.cli import options
from polyport.cli.exports import load, only_generating, processor_source
from polyport.cli.frame import Outcome, stderr, stdout
from polyport.cli.progress import Stages
from polyport.errors import ConfigError, InputError

_TOKENS = 64
_HOW = "How to choose tokens"


def generate(
    directory: options.Export,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="What to answer, - to read it from stdin; again for a batch.",
            rich_help_panel="Inputs",
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            "--system", metavar="TEXT", help="A system message before each prompt.", rich_help_panel="Inputs"
        ),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Don't use the model's chat template.", rich_help_panel="Inputs"),
    ] = False,
    image: options.Image = None,
    audio: options.Audio = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            metavar="N",
            min=1,
            help=f"When to stop at the latest; {_TOKENS} if left out.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    num_beams: Annotated[
        int,
        typer.Option("--num-beams", metavar="K", min=1, help="Beams to search with.", rich_help_panel=_HOW),
    ] = 1,
    sample: Annotated[
        bool,
        typer.Option(
            "--sample", help="Draw tokens by chance; otherwise the likeliest.", rich_help_panel=_HOW
        ),
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="T",
            min=1e-3,
            help="Below 1, likelier tokens; above, others.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", metavar="K", min=1, help="Draw from the K likeliest.", rich_help_panel=_HOW),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            metavar="P",
            min=1e-6,
            max=1,
            help="Draw from the likeliest that make up P.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="S", min=0, help="Draw the same every time.", rich_help_panel=_HOW),
    ] = None,
    device: options.Device = None,
    subfolder: options.Subfolder = "",
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    debug: options.Debug = False,  # noqa: ARG001 - read by the frame
) -> Outcome:
    """Answer a prompt with an export that was made with --generate; the text appears as it comes."""
    drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    chosen = {"num_beams": num_beams, **_choosing(sample, drawing, seed)}
    prompts = _prompts(prompt or ())
    stages = Stages(stderr(), quiet=quiet)
    with stages.stage("Loading the export"):
        exported, folder = load(
            directory,
            subfolder,
            revision=revision,
            device=device,
            trust=trust_remote_code,
            check=only_generating,
        )
        model = exported.as_transformers()
    with stages.stage("Making inputs"):
        inputs, tokenizer = _inputs(
            model, processor_source(directory, folder), prompts, image or (), audio or (), system, raw
        )
    chosen["max_new_tokens"] = _room(exported, inputs, max_new_tokens)
    streamed = num_beams == 1 and not as_json and _rows(inputs) == 1
    from polyport.cli.answering import generate as answer

    if seed is not None:
        import transformers

        transformers.set_seed(seed)
    stream: Any = stdout().file if streamed else None
    # where nothing comes before the end, the spinner shows that something is going on
    with contextlib.nullcontext() if streamed else stages.stage("Generating"):
        answers, timing, shown = answer(model, tokenizer, inputs, chosen, stream)
    document = {
        "directory": directory,
        "format": exported.export_format,
        "answers": [
            {
                "prompt": prompts[row] if row < len(prompts) else None,
                **attrs.asdict(one),
                "new_tokens": len(one.token_ids),
            }
            for row, one in enumerate(answers)
        ],
        "prompt_tokens": sum(one.prompt_tokens for one in answers),
        "new_tokens": sum(len(one.token_ids) for one in answers),
        "seconds": round(timing.seconds, 4),
        "seconds_to_first_token": None if timing.first is None else round(timing.first, 4),
        "tokens_per_second": None if timing.rate is None else round(timing.rate, 2),
    }
    return Outcome(document, lambda console: _show(console, document, shown, quiet))


def _choosing(sample: bool, drawing: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """`--sample` and what belongs to it, as kwargs of `generate`; without it, the likeliest token, whatever the model says."""
    given = {name: value for name, value in drawing.items() if value is not None}
    if sample:
        return {"do_sample": True, **given}
    idle = [f"--{name.replace('_', '-')}" for name in (*given, *(["seed"] if seed is not None else []))]
    if idle:
        raise ConfigError(
            f"Add --sample: without it, the likeliest token is taken, and there is no use for {' and '.join(idle)}."
        )
    return {"do_sample": False}


def _prompts(given: Sequence[str]) -> list[str]:
    if list(given).count("-") > 1:
        raise InputError("Only one prompt can be read from stdin.", stage="inputs")
    prompts = [sys.stdin.read().rstrip("\n") if one == "-" else one for one in given]
    if "" in prompts:
        raise InputError("A prompt is empty.", stage="inputs")
    return prompts


def _inputs(
    model: Any,
    location: str,
    prompts: list[str],
    images: Sequence[Path],
    audio: Sequence[Path],
    system: str | None,
    raw: bool,
) -> tuple[dict[str, Any], Any]:
    """Kwargs of `generate`, and the tokenizer to read the answer with."""
    import inspect

    from polyport.samples import fit_prompt, load_processors, prompt_inputs
    from polyport.samples.media import read_audio, read_image

    main = str(model.main_input_name)
    option = (
        "--prompt" if main == "input_ids" else "--image" if main.startswith(("pixel", "flat")) else "--audio"
    )
    reads = "input_ids" in inspect.signature(model.forward).parameters or main == "input_ids"
    if prompts and not reads:
        raise InputError(
            f"{type(model).__name__} reads no prompt. Give {option} alone.",
            stage="inputs",
        )
    if not (prompts or images or audio) or (main == "input_ids" and not prompts):
        raise InputError(f"There is nothing to answer. Give {option}.", stage="inputs")
    processors = load_processors(location)
    if processors.tokenizer is None:
        raise InputError(
            "There is no tokenizer beside the export to read prompts and answers with. Save the model's there: "
            f"tokenizer.save_pretrained({location!r}).",
            stage="inputs",
        )
    made = prompt_inputs(
        processors,
        prompts,
        images=[read_image(path) for path in images],
        audio=[read_audio(path, processors.sampling_rate) for path in audio],
        system=system,
        raw=raw,
        padding_side="right" if model.config.is_encoder_decoder else "left",
    )
    return fit_prompt(model, made), processors.tokenizer


def _rows(inputs: Mapping[str, Any]) -> int:
    return len(inputs["input_ids"]) if "input_ids" in inputs else len(next(iter(inputs.values())))


def _room(exported: Any, inputs: Mapping[str, Any], wanted: int | None) -> int:
    """How many tokens to generate at most: what was asked for, which must fit into a static cache.

    Raises:
        InputError: It doesn't.
    """
    size = getattr(exported.generation_config, "max_cache_len", None)
    if not exported.generation.static or not isinstance(size, int) or exported.config.is_encoder_decoder:
        return wanted or _TOKENS
    prompt = int(inputs["input_ids"].shape[1]) if "input_ids" in inputs else 0
    room = size - prompt
    if room < (wanted or 1):
        more = f" and {wanted} new ones" if wanted and room > 0 else ""
        raise InputError(
            f"The prompt's {prompt} tokens{more} don't fit into the export's static cache of {size}. Give a shorter prompt"
            f"{', or ask for fewer new ones' if more else ''}, or export with a larger --static-cache.",
            stage="inputs",
        )
    return wanted or min(_TOKENS, room)


def _show(console: Console, document: Mapping[str, Any], shown: bool, quiet: bool) -> None:
    answers = document["answers"]
    for index, one in enumerate(answers):
        if len(answers) > 1:
            console.print(f"[{index + 1}] {one['prompt'] or ''}".rstrip(), style="bold", markup=False)
        if not shown:
            console.print(one["text"], markup=False, soft_wrap=True)
    if not quiet:
        first, rate = document["seconds_to_first_token"], document["tokens_per_second"]
        said = [f"{document['prompt_tokens']} prompt tokens", f"{document['new_tokens']} new tokens"]
        said += [f"{first:.2f} s to the first"] if first is not None else []
        said += [f"{rate:.1f} tokens/s"] if rate is not None else []
        stderr().print(", ".join(said), markup=False, style="dim")
