"""One way to generate text in a process of its own, for `decode_speed.py`: it loads it once, and is asked many times.

It runs in the interpreter of the library that it stands for: optimum-intel and polyport need different versions of transformers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes

#: Ids of the prompt, number of tokens to make -> their ids.
Generate = Callable[[list[int], int], list[int]]


def _generated(model: Any) -> Generate:
    """The `generate` of a model, an export or optimum-intel's model."""
    import torch

    def generate(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
        )
        tokens: list[int] = made[0, len(prompt) :].tolist()
        return tokens

    return generate


def _eager(folder: Path) -> Generate:
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = None
    return _generated(model.eval())


def _ours(folder: Path) -> Generate:
    import generation_exports

    return _generated(generation_exports.loaded(folder, folder.name))


def _optimum(folder: Path, **config: Any) -> Generate:
    import openvino_loops
    from optimum.intel import OVModelForCausalLM

    model = OVModelForCausalLM.from_pretrained(folder, ov_config=openvino_loops.CONFIG | config)
    model.generation_config.eos_token_id = None
    return _generated(model)


def _bare_openvino(folder: Path) -> Generate:
    import openvino_loops

    return openvino_loops.loop(openvino_loops.graph(folder))


def _bare_executorch(folder: Path) -> Generate:
    import executorch_loops

    executorch_loops.one_thread()
    return executorch_loops.loop(folder)


KINDS: dict[str, Callable[[Path], Generate]] = {
    "eager": _eager,
    "ours": _ours,
    "optimum": _optimum,
    "optimum-f16": lambda folder: _optimum(folder, KV_CACHE_PRECISION="f16"),
    "bare-openvino": _bare_openvino,
    "bare-executorch": _bare_executorch,
}


def main() -> None:
    """Load, and answer each `[prompt, count]` with `[ids, CPU seconds, most memory so far]`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=2, metavar=("KIND", "FOLDER"), required=True)
    kind, folder = parser.parse_args().worker
    if kind != "bare-openvino":
        import torch

        torch.set_num_threads(1)
    generate = KINDS[kind](Path(folder))

    def answer(question: tuple[list[int], int]) -> tuple[list[int], float, int]:
        start = time.process_time()
        ids = generate(*question)
        return ids, time.process_time() - start, processes.peak()

    processes.answer(answer)


if __name__ == "__main__":
    main()
