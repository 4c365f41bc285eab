"""How fast ways to generate text are: each has a process that waits until it is asked, and all are asked in turn.

Shared by the scripts that compare exports of a language model for generation.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import generation_exports as exports
import processes

#: Tokens that are made after each prompt.
TOKENS = 64

#: Question (`all` tokens, the `first` one; `memory`, the most that a process took) -> way to generate -> the answers.
Found = dict[str, dict[str, list[float]]]
#: Way to generate -> the interpreter, and the arguments of `contender.py`.
Contenders = Mapping[str, tuple[str, str, str]]
#: One part of a script: it measures, prints a table, and returns the numbers.
Part = Callable[[Path, argparse.Namespace], Any]

_SCRIPT = Path(__file__).parent / "contender.py"


def parser(
    doc: str | None, parts: Iterable[str], names: Sequence[str], repeats: int
) -> argparse.ArgumentParser:
    """The options that all scripts have.

    Args:
        doc: What the script does.
        parts: Its parts.
        names: The exports that it compares.
        repeats: How many exports of each kind it makes by default.
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = list(parts)
    made.add_argument("--parts", nargs="+", choices=parts, default=parts)
    made.add_argument("--exports", nargs="+", choices=names, default=list(names))
    made.add_argument("--repeats", type=int, default=repeats, help="exports of each kind")
    made.add_argument("--processes", type=int, default=3, help="how often each way is loaded anew")
    made.add_argument("--rounds", type=int, default=5, help="rounds of generating with each of these")
    made.add_argument("--folder", type=Path, help="where exports are kept, and taken from if they are there")
    made.add_argument("--out", type=Path, help="JSON file for the numbers")
    return made


@contextlib.contextmanager
def kept_in(folder: Path | None) -> Iterator[Path]:
    """The folder of the exports, or one for the time being if none is given."""
    if folder is not None:
        yield folder.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="polyport-bench-") as temporary:
        yield Path(temporary).resolve()


def export_folder(folder: Path, name: str) -> Path:
    """Where an export of all layers of the model is."""
    return folder / f"{name}-0"


def prompt(folder: Path, length: int) -> list[int]:
    """Ids of a prompt of so many tokens.

    Args:
        folder: Where the model is.
        length: The number.
    """
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(exports.source(folder))
    ids: list[int] = tokenizer(exports.LONG_TEXT)["input_ids"][:length]
    return ids


def export_table(found: Mapping[str, list[dict[str, float]]]) -> str:
    """What exports cost: the least of the CPU seconds, the median of the memory.

    Args:
        found: Export -> the records of its repeats (see `generation_exports.made`).
    """
    rows = []
    for name, records in found.items():
        spent = min(r.get("export_and_save_s", r.get("export_s", 0) + r.get("save_s", 0)) for r in records)
        memory = statistics.median(record["peak_ratio"] for record in records)
        rows.append([name, f"{spent:.1f}", f"{memory:.2f}", f"{records[0]['disk_ratio']:.3f}"])
    head = ["export", "export and save, CPU s", "peak memory, × weights", "disk, × weights"]
    return processes.table(head, rows)


def measured(
    contenders: Contenders, prompts: Mapping[int, list[int]], count: int, rounds: int
) -> dict[int, Found]:
    """Length of a prompt -> what all said about it; one of the contenders is `eager`, whose tokens are the right ones.

    Args:
        contenders: The ways to generate.
        prompts: Length -> ids.
        count: How often each way is loaded anew.
        rounds: How often each is asked then.
    """
    found: dict[int, Found] = {length: {"all": {}, "first": {}, "memory": {}} for length in prompts}
    shortest = min(prompts)
    for _ in range(count):
        with contextlib.ExitStack() as stack:
            asked: dict[str, Callable[[Any], Any]] = {}
            for name, (python, *arguments) in contenders.items():
                asked[name] = stack.enter_context(processes.answering(_SCRIPT, *arguments, python=python))
                asked[name]([prompts[shortest], 1])  # so that one after another loads
            for length, ids in prompts.items():
                _ask(asked, {"all": [ids, TOKENS], "first": [ids, 1]}, rounds, found[length])
    return found


def _ask(
    asked: dict[str, Callable[[Any], Any]], questions: dict[str, list[Any]], rounds: int, found: Found
) -> None:
    wanted = asked["eager"](questions["all"])[0]
    for name, ask in asked.items():
        made, _, most = ask(questions["all"])  # the first time, requests and buffers are made
        found["memory"].setdefault(name, []).append(most)
        if made != wanted:
            print(f"{name} makes other tokens than eager: {made}, not {wanted}", flush=True)
    for _ in range(rounds):
        for question, content in questions.items():
            for name, ask in asked.items():
                found[question].setdefault(name, []).append(ask(content)[1])


def table(found: Found) -> str:
    """Tokens per second, later tokens and the first one, over eager.

    Args:
        found: What all said about one prompt.
    """
    rows = []
    for name, spent in found["all"].items():
        rows.append(
            [
                name,
                f"{TOKENS / statistics.median(spent):.1f}",
                f"{ratio(found['all']['eager'], spent):.2f}",
                f"{1000 * statistics.median(_later(found, name)) / (TOKENS - 1):.2f}",
                f"{ratio(_later(found, 'eager'), _later(found, name)):.2f}",
                f"{1000 * statistics.median(found['first'][name]):.0f}",
                f"{ratio(found['first']['eager'], found['first'][name]):.2f}",
                f"{statistics.median(found['memory'][name]) / 2**20:.0f}",
            ]
        )
    head = ["way", "tokens/s", "over eager", "ms per later token", "over eager"]
    head += ["ms for the first", "over eager", "most memory, MiB"]
    return processes.table(head, rows)


def pairs_table(found: Found, pairs: Iterable[tuple[str, str]]) -> str:
    """How long one way takes over another one, for those that were measured.

    Args:
        found: What all said about one prompt.
        pairs: Ways to generate.
    """
    rows = []
    for one, other in pairs:
        if one in found["all"] and other in found["all"]:
            rows.append(
                [
                    one,
                    other,
                    f"{ratio(found['all'][one], found['all'][other]):.2f}",
                    f"{ratio(_later(found, one), _later(found, other)):.2f}",
                    f"{ratio(found['first'][one], found['first'][other]):.2f}",
                ]
            )
    head = ["one", "other", "time of all tokens, one / other", "of later tokens", "of the first"]
    return processes.table(head, rows, words=2)


def _later(found: Found, name: str) -> list[float]:
    """Seconds of all tokens but the first, by rounds."""
    return [a - b for a, b in zip(found["all"][name], found["first"][name], strict=True)]


def ratio(one: list[float], other: list[float]) -> float:
    """The median of what the rounds say: what disturbs one round disturbs both of its measurements."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def show(title: str, content: str) -> None:
    """Print a table."""
    print(f"\n{title}\n\n{content}", flush=True)
