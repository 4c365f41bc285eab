from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StaticCache

from polyport import ExportedModel
from polyport_executorch import ExecutorchConfig, ExecutorchExporter

sys.path.insert(0, str(Path(__file__).parent))  # for what the test modules share


@pytest.fixture(scope="session")
def exported(tiny_bert: Any, token_ids: Any) -> ExportedModel:
    return ExecutorchExporter().export(tiny_bert, token_ids(1, 5), ExecutorchConfig(dynamic=True))


@pytest.fixture(scope="session")
def saved(exported: ExportedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("executorch") / "export"
    exported.save_pretrained(folder)
    return folder


@pytest.fixture
def loaded(saved: Path) -> ExportedModel:
    return ExportedModel.from_pretrained(saved)


@pytest.fixture(scope="session")
def small() -> torch.nn.Module:
    """What lowers quickest, for tests that need a lowering of their own."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=48,
    )
    return BertModel(config, add_pooling_layer=False).eval()


@pytest.fixture
def install_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Any], None]]:
    """Install a distribution that brings something as a recipe."""

    def install(name: str, recipe: Any) -> None:
        site = tmp_path / "site"
        info = site / "acme_recipes-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-recipes\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            f"[polyport_executorch.recipes]\n{name} = acme_recipes:recipe\n"
        )
        (site / "acme_recipes.py").write_text("recipe = None\n")
        monkeypatch.syspath_prepend(site)
        importlib.invalidate_caches()
        module = importlib.import_module("acme_recipes")
        monkeypatch.setattr(module, "recipe", recipe)

    yield install
    sys.modules.pop("acme_recipes", None)


@pytest.fixture(scope="session")
def static_step() -> Callable[..., dict[str, Any]]:
    """A call of the llama with a cache of a fixed size, with different tokens for each place."""

    def make(cache: Any, past: int, batch: int, query: int) -> dict[str, Any]:
        positions = torch.arange(past, past + query)
        mask = (torch.arange(24) <= positions[:, None]).expand(batch, 1, query, 24)
        ids = (7 * torch.arange(batch)[:, None] + 5 * positions) % 63 + 1
        return {
            "input_ids": ids, "attention_mask": mask, "position_ids": positions.repeat(batch, 1), "cache": cache,
            "use_cache": True,
        }  # fmt: skip

    return make


@pytest.fixture(scope="session")
def static_cache(tiny_llama: Any) -> Callable[[int], StaticCache]:
    def make(batch: int) -> StaticCache:
        cache = StaticCache(config=tiny_llama.config, max_cache_len=24)
        cache.early_initialization(
            batch_size=batch, num_heads=2, head_dim=8, dtype=torch.float32, device=torch.device("cpu")
        )
        return cache

    return make
