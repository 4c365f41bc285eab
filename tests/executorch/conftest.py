from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polyport import ExportedModel
from polyport.assembly import Pipeline
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


@pytest.fixture
def seeded() -> None:
    """Layers have the same weights on each run."""
    torch.manual_seed(0)


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


@pytest.fixture(scope="module")
def pipeline(small: Any, token_ids: Any) -> Pipeline:
    """The small model, traced once for all of its lowerings."""
    return Pipeline(small, token_ids(1, 5))


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
