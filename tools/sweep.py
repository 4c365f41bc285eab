"""Export every model of the zoo to every format, and compare what comes out with the model itself.

    python tools/sweep.py --formats dynamo onnx openvino
    python tools/sweep.py --formats onnx --cases bert whisper --fresh
    python tools/sweep.py --formats dynamo --generate

Each case is a process of its own with a limit of CPU time. It builds the model, exports it with `dynamic=True` from the
sample inputs alone (all formats in one call, so that they share the trace), saves, loads, and runs what was loaded at three
shapes: the sample's, another one, and batch 1. Every output leaf is held against eager's. With `--generate`, the cases that
generate are exported for generation instead, and the tokens that come out are held against eager's.

Results go to a file of JSON lines as they come, keyed by case, task, format and the versions that made them; what is there
already is not run again. From these the tables in `docs/reference/` are written.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import pkgutil
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]

import sweep_case  # noqa: E402
import sweep_generate  # noqa: E402
import sweep_table  # noqa: E402

from polyport.session import Session  # noqa: E402

#: Wall-clock limit in multiples of the CPU limit: other work may share the cores.
WALL_FACTOR = 8

#: Parts of core that need packages of their own, and that no export uses.
_NOT_FOR_EXPORTS = ("polyport.cli", "polyport.testing", "polyport.__main__")

Record = dict[str, Any]

#: Case, its formats, and who hears the stages -> a record per format.
Examine = Callable[[str, list[str], sweep_case.Announce], Iterator[Record]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = _parser().parse_args(arguments)
    zoo = importlib.import_module(options.zoo)
    task = "generate" if options.generate else "forward"
    cases = options.cases or (zoo.generative() if options.generate else zoo.names())
    if unknown := sorted(set(cases) - set(zoo.names())):
        raise SystemExit(f"No such case: {', '.join(unknown)}. The zoo has: {', '.join(zoo.names())}")
    versions = {name: _preload(name) for name in options.formats}
    options.results.parent.mkdir(parents=True, exist_ok=True)

    def asked_for(record: Record) -> bool:
        same = record["case"] in cases and record.get("task", "forward") == task
        return same and record["format"] in options.formats

    kept = read_results(options.results)
    if options.fresh:
        kept = [record for record in kept if not asked_for(record)]
    if options.failed:
        kept = [record for record in kept if record["ok"] or not asked_for(record)]
    _rewrite(options.results, kept)
    done = {
        (r["case"], r["format"]) for r in kept if asked_for(r) and r["versions"] == versions.get(r["format"])
    }
    todo = [(case, [f for f in options.formats if (case, f) not in done]) for case in cases]
    todo = [(case, formats) for case, formats in todo if formats]
    print(f"{len(cases)} cases, {len(todo)} to run", flush=True)

    def keep(record: Record) -> None:
        record = {**record, "task": task, "versions": versions[record["format"]]}
        with options.results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(sweep_table.one_line(record), flush=True)

    examine = sweep_generate.examine if options.generate else sweep_case.examine
    run_all(functools.partial(examine, zoo), todo, options.time_limit, options.jobs, keep)
    if options.out:
        current = [r for r in read_results(options.results) if r["versions"] == versions.get(r["format"])]
        modalities = {name: zoo.CASES[name].modality for name in zoo.names()}
        sweep_table.write(options.out, current, modalities, options.peer, options.known_failures)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--formats", nargs="+", required=True, help="installed formats to export to")
    add("--cases", nargs="+", help="cases to run (all)")
    add("--jobs", type=int, default=1, help="cases at a time (1)")
    add("--time-limit", type=int, default=60, help="CPU seconds per case, all formats together (60)")
    add("--out", type=Path, default=ROOT / "docs/reference/zoo", help="tables to write: OUT.json and OUT.md")
    add("--results", type=Path, default=ROOT / "build/sweep/results.jsonl", help="where results are kept")
    add("--generate", action="store_true", help="generate with the models that do, in place of forward")
    add("--fresh", action="store_true", help="run the cases again, whatever is kept of them")
    add("--failed", action="store_true", help="run those of the cases again that failed")
    add("--zoo", default="zoo", help="module with the models (zoo)")
    add("--peer", type=Path, default=ROOT / "tests/zoo/peer_forward.csv", help="the peer's results")
    add(
        "--known-failures",
        type=Path,
        default=ROOT / "tests/zoo/known_failures.toml",
        help="reasons of failures",
    )
    return parser


def _preload(name: str) -> dict[str, str]:
    """Import all of core and of a backend; returns the versions that its results depend on.

    Forked cases need not import them then, and all cases run the code as it was when the sweep started.
    """
    session = Session(name)
    for root in ("polyport", session.plugin.entry_point.module.split(".")[0]):
        package = importlib.import_module(root)
        for module in pkgutil.walk_packages(package.__path__, f"{root}."):
            if not module.name.startswith(_NOT_FOR_EXPORTS):
                importlib.import_module(module.name)
    wanted = ["polyport", session.plugin.distribution, "torch", "transformers", *session.backend.packages]
    found = {}
    for distribution in dict.fromkeys(wanted):
        try:
            found[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue  # run from a source tree
    return found


def read_results(path: Path) -> list[Record]:
    """The kept results, the newest of each key; a line that a crash cut short is left out."""
    newest: dict[str, Record] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        key = [record["case"], record.get("task", "forward"), record["format"], record["versions"]]
        newest[json.dumps(key, sort_keys=True)] = record
    return list(newest.values())


def _rewrite(path: Path, records: Sequence[Record]) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(json.dumps(record) + "\n" for record in records))
    fresh.replace(path)


# ── one process per case ────────────────────────────────────────────────────────────────────────────────────────────


def run_all(
    examine: Examine,
    todo: Sequence[tuple[str, list[str]]],
    time_limit: int,
    jobs: int,
    keep: Callable[[Record], None],
) -> None:
    """Run the cases, `jobs` at a time; `keep` gets one record per case and format, whatever happens to the process."""
    # Forked from here, a case starts with torch, transformers and the backends imported.
    context = multiprocessing.get_context("fork")
    waiting, running = list(todo), dict[Any, _Running]()
    while waiting or running:
        while waiting and len(running) < jobs:
            case, formats = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(examine, case, formats, time_limit, sender))
            process.start()
            sender.close()
            running[receiver] = _Running(case, formats, process, time.monotonic() + WALL_FACTOR * time_limit)
        ready: list[Any] = wait(list(running), timeout=1.0)
        for receiver in ready:
            try:
                running[receiver].take(receiver.recv(), keep)
            except EOFError:
                job = running.pop(receiver)
                if left := job.finish(time_limit, keep):
                    waiting.insert(0, (job.case, left))
        for job in running.values():
            if time.monotonic() > job.deadline:
                job.process.kill()


class _Running:
    """A case that is being run, and what it has reported so far."""

    def __init__(self, case: str, formats: list[str], process: Any, deadline: float) -> None:
        self.case, self.missing, self.process, self.deadline = case, list(formats), process, deadline
        self.stage = "build"
        self.format: str | None = None

    def take(self, message: Record, keep: Callable[[Record], None]) -> None:
        if "stage_now" in message:
            self.stage, self.format = message["stage_now"]
        else:
            self.missing.remove(message["format"])
            keep(message)

    def finish(self, time_limit: int, keep: Callable[[Record], None]) -> list[str]:
        """The process ended: say why for the format it was at; returns the others that it did not get to."""
        self.process.join()
        code = self.process.exitcode
        late = code in (-signal.SIGXCPU, -signal.SIGKILL)
        reason = f"took more than {time_limit} s of CPU time" if late else f"the process ended with {code}"
        stopped = [self.format] if self.format in self.missing else self.missing
        for name in stopped:
            keep({"case": self.case, "format": name, "ok": False, "stage": self.stage, "error": reason})
        return [name for name in self.missing if name not in stopped]


def _child(examine: Examine, case: str, formats: list[str], time_limit: int, sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (time_limit, time_limit + 5))
    warnings.simplefilter("ignore")

    def announce(stage: str, name: str | None) -> None:
        sender.send({"stage_now": (stage, name)})

    for record in examine(case, formats, announce):
        sender.send(record)
    sender.close()


if __name__ == "__main__":
    sys.exit(main())
