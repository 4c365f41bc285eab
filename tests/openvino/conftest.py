from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from polyport import ExportedModel
from polyport_openvino import OpenVINOConfig, OpenVINOExporter

sys.path.insert(0, str(Path(__file__).parent))  # for what the test modules share


@pytest.fixture(scope="session")
def exported(tiny_bert: Any, token_ids: Any) -> ExportedModel:
    return OpenVINOExporter().export(tiny_bert, token_ids(1, 5), OpenVINOConfig(dynamic=True))


@pytest.fixture(scope="session")
def saved(exported: ExportedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("openvino") / "export"
    exported.save_pretrained(folder)
    return folder
