"""Encoder-decoders, speech and images: generating in a process that has nothing but the export's folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import polyport

sys.path.insert(0, str(Path(__file__).parents[1]))

import zoo

pytestmark = pytest.mark.xdist_group("generation_fresh")

FORMATS = ("dynamo", "onnx", "openvino")
MODELS = (
    "whisper", "t5", "bart", "llava", "qwen2_vl", "idefics3", "paligemma", "gemma3", "qwen2_audio",
)  # fmt: skip

OPTIONS = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}

_PROGRAM = """
import json, sys, warnings
from pathlib import Path
import torch
from safetensors.torch import load_file
from polyport import ExportedModel
torch.set_num_threads(1)
root, options, made = Path(sys.argv[1]), json.loads(sys.argv[2]), {}
for folder in sorted(root.iterdir()):
    exported = ExportedModel.from_pretrained(folder / "export")
    for inputs in sorted(folder.glob("*.safetensors")):
        for beams in (1, 3):
            ids = exported.generate(**load_file(inputs), num_beams=beams, **options)
            made[f"{folder.name} {inputs.stem} {beams}"] = ids.tolist()
print(json.dumps(made))
"""


@pytest.fixture(scope="module")
def asked(tmp_path_factory: Any) -> dict[str, Any]:
    """What eager generates, and a folder per format with the exports and their inputs."""
    root = tmp_path_factory.mktemp("fresh")
    wanted: dict[str, Any] = {}
    for name in MODELS:
        model, _, prompt = zoo.build(name)
        assert prompt is not None
        configs = [{"export_format": export_format, "dynamic": True} for export_format in FORMATS]
        exports = polyport.export_for_generation(model, prompt, configs)
        for kind, inputs in {"one": prompt, "two": zoo.padded_prompts(name)}.items():
            for export_format, exported in exports.items():
                folder = root / export_format / name
                if kind == "one":
                    exported.save_pretrained(folder / "export")
                save_file({k: v.contiguous() for k, v in inputs.items()}, folder / f"{kind}.safetensors")
            for beams in (1, 3):
                with torch.no_grad():
                    ids = model.generate(**inputs, num_beams=beams, **OPTIONS)
                wanted[f"{name} {kind} {beams}"] = ids.tolist()
    return {"root": root, "wanted": wanted}


@pytest.mark.parametrize("export_format", FORMATS)
def test_same_ids_from_the_folder_alone(asked: dict[str, Any], export_format: str) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(asked["root"] / export_format), json.dumps(OPTIONS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == asked["wanted"]
