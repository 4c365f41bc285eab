"""An export in a folder that belongs to somebody else, loaded by a user who may only read it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

import polyport
from polyport import DynamoConfig, OnnxConfig, OpenVINOConfig

CONFIGS = {"dynamo": DynamoConfig, "onnx": OnnxConfig, "openvino": OpenVINOConfig}

#: The folder belongs to a user that isn't this process's. A superuser gives up its privileges first, and is then anybody; who
#: can't give a folder away is its owner, without the right to write.
_SCRIPT = """
import ctypes, os, sys
folder = sys.argv[1]
if os.getuid() == 0:
    # capset(2) with nothing in it
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, nothing) == 0
assert not os.access(folder, os.W_OK)
os.environ["HOME"] = "/nonexistent"
os.chdir("/")
import torch
from polyport import ExportedModel
ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
found = ExportedModel.from_pretrained(folder)(input_ids=ids).last_hidden_state
print(",".join(f"{x:.6f}" for x in found.flatten().tolist()))
"""


@pytest.fixture(scope="module")
def exports() -> Iterator[tuple[Path, torch.Tensor]]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = BertModel(BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=16)).eval()
    # pytest's own folders can't be entered by another user
    root = Path(tempfile.mkdtemp(prefix="polyport-other-user-"))
    root.chmod(0o755)
    try:
        sample = {"input_ids": torch.tensor([[3, 4, 5]])}
        configs = [config(dynamic=True) for config in CONFIGS.values()]
        for name, exported in polyport.export(model, sample, configs).items():
            exported.save_pretrained(root / name)
            for file in (root / name).iterdir():
                file.chmod(0o444)
            (root / name).chmod(0o555)
            if os.getuid() == 0:
                for path in (root / name, *(root / name).iterdir()):
                    os.chown(path, 12345, 12345)
        with torch.no_grad():
            wanted = model(input_ids=torch.tensor([[3, 4, 5], [6, 7, 8]])).last_hidden_state
        yield root, wanted
    finally:
        for name in CONFIGS:
            if (root / name).exists():
                (root / name).chmod(0o755)
        shutil.rmtree(root)


@pytest.mark.parametrize("export_format", CONFIGS)
def test_another_user_reads_it(exports: tuple[Path, torch.Tensor], export_format: str) -> None:
    root, wanted = exports
    before = sorted(path.name for path in (root / export_format).iterdir())
    child = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(root / export_format)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert child.returncode == 0, child.stderr
    found = torch.tensor([float(x) for x in child.stdout.strip().split(",")]).reshape(wanted.shape)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert sorted(path.name for path in (root / export_format).iterdir()) == before
