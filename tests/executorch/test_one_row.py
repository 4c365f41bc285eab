"""Generation in one row, for which there is room by default: the batch is a number in what is lowered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from polyport import ExportedModel
from polyport.errors import InputError
from polyport_executorch import ExecutorchConfig, ExecutorchExporter
from polyport_executorch.delegation import REPORT

SAMPLE = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]])}
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
#: Options of the export, and which graphs it has.
WAYS = {
    "growing, two graphs": ({}, False),
    "growing, one graph": ({}, True),
    "kept, two graphs": ({"stateful": True}, False),
    "kept, one graph": ({"stateful": True}, True),
    "static, two graphs": ({}, False),
}


@pytest.fixture(scope="module", params=WAYS)
def exported(request: pytest.FixtureRequest, tiny_llama: Any, tmp_path_factory: Any) -> ExportedModel:
    options, many = WAYS[request.param]
    settings = GenerationConfig.from_dict(tiny_llama.generation_config.to_dict())
    if "static" in request.param:
        settings.cache_implementation, settings.max_cache_len = "static", 40
    config = ExecutorchConfig(dynamic=True, **options)
    made = ExecutorchExporter().export_for_generation(
        tiny_llama, SAMPLE, config, settings, multi_token_decode=many
    )
    folder: Path = tmp_path_factory.mktemp("one-row") / "export"
    made.save_pretrained(folder)
    return ExportedModel.from_pretrained(folder)


@pytest.mark.parametrize("length", [1, 5, 3, 19])
def test_same_ids_as_eager(exported: ExportedModel, tiny_llama: Any, length: int) -> None:
    ids = torch.randint(1, 64, (1, length), generator=torch.Generator().manual_seed(length))
    expected = tiny_llama.generate(input_ids=ids, **OPTIONS)
    assert exported.generate(input_ids=ids, **OPTIONS).tolist() == expected.tolist()


def test_two_rows_are_refused(exported: ExportedModel) -> None:
    with pytest.raises(InputError, match="'batch' has size 2, which must be"):
        exported.generate(input_ids=torch.tensor([[5, 6], [7, 8]]), **OPTIONS)


def test_a_step_of_one_token_is_delegated_whole(tiny_llama: Any) -> None:
    """Its only sizes that vary are the cache's, so that XNNPACK takes what else moves data between its parts."""
    made = ExecutorchExporter().export_for_generation(tiny_llama, SAMPLE, ExecutorchConfig(dynamic=True))
    counts = {name: part.metadata.backend[REPORT]["delegated"] for name, part in made.components.items()}
    assert counts["decode"]["XnnpackBackend"]["delegates"] <= 3
    assert counts["prefill"]["XnnpackBackend"]["delegates"] > 3
