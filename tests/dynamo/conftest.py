from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyport import DynamoConfig, DynamoExporter, ExportedModel


@pytest.fixture(scope="session")
def exported(tiny_bert: Any, token_ids: Any) -> ExportedModel:
    return DynamoExporter().export(tiny_bert, token_ids(1, 5), DynamoConfig(dynamic=True))


@pytest.fixture(scope="session")
def saved(exported: ExportedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dynamo") / "export"
    exported.save_pretrained(folder)
    return folder
