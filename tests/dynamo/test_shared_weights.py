"""Weights that several components share: written once, and once in memory after loading."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from polyport import DynamoConfig, DynamoExporter, ExportedModel
from polyport_dynamo import mapped
from polyport_dynamo.archive import load_program, save_programs
from polyport_dynamo.shared import WEIGHTS_FILE, shared_weights


def _step(model: Any, length: int = 5, batch: int = 1) -> dict[str, Any]:
    """The inputs of the step after `length` tokens."""
    ids = torch.arange(batch * (length + 1)).reshape(batch, -1) % 60 + 1
    with torch.no_grad():
        cache = model(input_ids=ids[:, :-1]).cache
    return {"input_ids": ids[:, -1:], "attention_mask": torch.ones_like(ids), "cache": cache}


def _pair(model: Any) -> ExportedModel:
    config = DynamoConfig(dynamic=True)
    prefill = DynamoExporter().export(model, {"input_ids": torch.ones(1, 5, dtype=torch.int64)}, config)
    decode = DynamoExporter().export(model, _step(model), config)
    return ExportedModel(
        "dynamo", {"prefill": prefill["model"], "decode": decode["model"]}, config=model.config
    )


@pytest.fixture(scope="module")
def pair(tiny_llama: Any) -> ExportedModel:
    return _pair(tiny_llama)


@pytest.fixture(scope="module")
def folder(pair: ExportedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared") / "export"
    pair.save_pretrained(path)
    return path


def _ptrs(program: Any) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in program.state_dict.items()}


# ── of a model ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_files(folder: Path, tiny_llama: Any) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "decode.pt2", "export.json", "prefill.pt2", WEIGHTS_FILE,
    ]  # fmt: skip
    manifest = json.loads((folder / "export.json").read_text())
    for name, component in manifest["components"].items():
        assert [file["name"] for file in component["files"]] == [f"{name}.pt2", WEIGHTS_FILE]
    state = tiny_llama.state_dict()
    stored = load_file(folder / WEIGHTS_FILE)
    assert set(stored) < set(state)  # lm_head is tied
    for name, tensor in stored.items():
        if name in state:
            assert torch.equal(tensor, state[name]), name


def test_archives_hold_no_weights(folder: Path) -> None:
    for name in ("prefill", "decode"):
        with zipfile.ZipFile(folder / f"{name}.pt2") as archive:
            for entry in archive.infolist():
                small = entry.file_size <= (0 if "/weight_" in entry.filename else 1024)
                assert small or entry.filename.endswith(".json"), entry.filename


def test_size_on_disk(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    _pair(model).save_pretrained(tmp_path / "export")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(path.stat().st_size for path in (tmp_path / "export").iterdir()) <= 1.05 * weights


FRESH = """
import sys, torch
from polyport import ExportedModel
from transformers import DynamicCache

export = ExportedModel.from_pretrained(sys.argv[1])
case = torch.load(sys.argv[2], weights_only=True)
ids = case["ids"]
first = export.caller("prefill")({"input_ids": ids[:, :-1]})
torch.testing.assert_close(first.logits, case["first"], atol=1e-5, rtol=0)
inputs = {"input_ids": ids[:, -1:], "attention_mask": torch.ones_like(ids), "cache": first.cache}
torch.testing.assert_close(export.caller("decode")(inputs).logits, case["second"], atol=1e-5, rtol=0)
a, b = (export[name].program.state_dict for name in ("prefill", "decode"))
assert all(a[name].data_ptr() == b[name].data_ptr() for name in a) and len(a) > 20
"""


def test_in_a_fresh_process(pair: ExportedModel, tiny_llama: Any, tmp_path: Path) -> None:
    pair.save_pretrained(tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / "elsewhere")
    ids = torch.randint(1, 60, (2, 8))
    with torch.no_grad():
        first = tiny_llama(input_ids=ids[:, :-1])
        case = {"ids": ids, "first": first.logits.clone()}
        case["second"] = tiny_llama(input_ids=ids[:, -1:], cache=first.cache).logits
    torch.save(case, tmp_path / "case.pt")
    command = [sys.executable, "-c", FRESH, str(tmp_path / "elsewhere"), str(tmp_path / "case.pt")]
    subprocess.run(command, check=True)


def test_one_memory(folder: Path) -> None:
    export, again = ExportedModel.from_pretrained(folder), ExportedModel.from_pretrained(folder)
    expected = _ptrs(export["prefill"].program)
    assert len(expected) > 20
    for other in (export["decode"], again["prefill"], again["decode"]):
        assert _ptrs(other.program) == expected
    assert expected["lm_head.weight"] == expected["model.embed_tokens.weight"]


def test_under_other_names(tiny_llama: Any, tmp_path: Path) -> None:
    """The body of a model calls its weights otherwise than the model does."""
    inputs = {"input_ids": torch.ones(1, 5, dtype=torch.int64)}
    parts = {
        name: DynamoExporter().export(model, inputs, DynamoConfig(dynamic=True))["model"]
        for name, model in (("body", tiny_llama.model), ("whole", tiny_llama))
    }
    ExportedModel("dynamo", parts, config=tiny_llama.config).save_pretrained(tmp_path / "export")
    loaded = ExportedModel.from_pretrained(tmp_path / "export")
    body, whole = _ptrs(loaded["body"].program), _ptrs(loaded["whole"].program)
    assert len(body) > 10
    assert all(whole[f"model.{name}"] == place for name, place in body.items())
    stored = load_file(tmp_path / "export" / WEIGHTS_FILE)
    assert sum(tensor.nbytes for tensor in stored.values()) <= 1.01 * sum(
        parameter.nbytes for parameter in tiny_llama.parameters()
    )


def test_one_component_is_what_torch_writes(pair: ExportedModel, tmp_path: Path) -> None:
    ExportedModel("dynamo", {"model": pair["prefill"]}, config=pair.config).save_pretrained(tmp_path / "one")
    assert not (tmp_path / "one" / WEIGHTS_FILE).exists()
    program = torch.export.load(str(tmp_path / "one" / "model.pt2"))
    ids = torch.ones(1, 4, dtype=torch.int64)
    assert program.module()(input_ids=ids, attention_mask=ids).logits.shape == (1, 4, 64)


def test_same_bytes(pair: ExportedModel, folder: Path, tmp_path: Path) -> None:
    pair.save_pretrained(tmp_path / "again")
    for path in folder.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


def test_same_weights_from_a_loaded_export(folder: Path, tmp_path: Path) -> None:
    ExportedModel.from_pretrained(folder).save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / WEIGHTS_FILE).read_bytes() == (folder / WEIGHTS_FILE).read_bytes()


def test_program_in_memory_keeps_its_own(pair: ExportedModel, folder: Path, tiny_llama: Any) -> None:
    program = pair["decode"].program
    weight = program.state_dict["model.norm.weight"]
    assert weight.data_ptr() == tiny_llama.model.norm.weight.data_ptr()
    assert program.example_inputs is not None


def test_inspect(folder: Path, pair: ExportedModel) -> None:
    from polyport_dynamo.plugin import polyport_describe

    loaded = ExportedModel.from_pretrained(folder)
    for name in pair:
        assert polyport_describe(loaded[name]) == polyport_describe(pair[name])


def test_trust_changes_nothing(folder: Path) -> None:
    trusted = ExportedModel.from_pretrained(folder, trust_remote_code=True)
    assert _ptrs(trusted["decode"].program) == _ptrs(ExportedModel.from_pretrained(folder)["prefill"].program)


TRUSTED = """
import sys
from polyport import ExportedModel

print(*ExportedModel.from_pretrained(sys.argv[1], trust_remote_code=True))
"""


def test_trusted_in_a_fresh_process(folder: Path) -> None:
    """A trusted archive is read unchecked; the classes in the structure of its call are registered all the same."""
    found = subprocess.run([sys.executable, "-c", TRUSTED, str(folder)], check=True, capture_output=True)
    assert found.stdout.split() == [b"prefill", b"decode"]


# ── files and maps ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_map_goes_with_its_last_user(folder: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folder, tmp_path / "export")
    gc.collect()
    before = len(mapped._open)
    export = ExportedModel.from_pretrained(tmp_path / "export")
    assert len(mapped._open) == before + 1
    del export
    gc.collect()
    assert len(mapped._open) == before


def test_a_newer_export_in_the_same_place(tmp_path: Path, tiny_llama: Any) -> None:
    from copy import deepcopy

    ids = torch.ones(1, 5, dtype=torch.int64)
    newer = deepcopy(tiny_llama)
    with torch.no_grad():
        newer.model.norm.weight.mul_(2)
        wanted, changed = tiny_llama(input_ids=ids).logits, newer(input_ids=ids).logits
    _pair(tiny_llama).save_pretrained(tmp_path / "export")
    old = ExportedModel.from_pretrained(tmp_path / "export")
    _pair(newer).save_pretrained(tmp_path / "export")
    new = ExportedModel.from_pretrained(tmp_path / "export")
    for _ in range(2):
        got = (
            old.caller("prefill")({"input_ids": ids}).logits,
            new.caller("prefill")({"input_ids": ids}).logits,
        )
        torch.testing.assert_close(got[0], wanted, atol=1e-6, rtol=0)
        torch.testing.assert_close(got[1], changed, atol=1e-6, rtol=0)


def test_an_export_saved_over_itself(folder: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folder, tmp_path / "export")
    loaded = ExportedModel.from_pretrained(tmp_path / "export")
    loaded.save_pretrained(tmp_path / "export")
    assert (tmp_path / "export" / WEIGHTS_FILE).read_bytes() == (folder / WEIGHTS_FILE).read_bytes()


def test_read_only_and_linked(folder: Path, tmp_path: Path) -> None:
    """As in the hub's cache: links into a folder of blobs, and nothing may be written."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        blob = blobs / f"{number:040x}"
        blob.write_bytes(path.read_bytes())
        blob.chmod(0o444)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    for place in (blobs, snapshot):
        place.chmod(0o555)
    try:
        export = ExportedModel.from_pretrained(snapshot)
        assert _ptrs(export["prefill"].program) == _ptrs(export["decode"].program)
        assert (
            export.caller("prefill")({"input_ids": torch.ones(1, 3, dtype=torch.int64)})
            .logits.isfinite()
            .all()
        )
    finally:
        for place in (blobs, snapshot):
            place.chmod(0o755)


def test_the_file_is_never_written(folder: Path) -> None:
    before = (folder / WEIGHTS_FILE).read_bytes()
    export = ExportedModel.from_pretrained(folder)
    with torch.no_grad():
        weight = export["prefill"].program.state_dict["model.norm.weight"]
        weight.add_(1)
        assert not torch.equal(weight, load_file(folder / WEIGHTS_FILE)["model.norm.weight"])
        weight.sub_(1)
    assert (folder / WEIGHTS_FILE).read_bytes() == before


def test_loading_in_several_threads(folder: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        exports = list(pool.map(lambda _: ExportedModel.from_pretrained(folder), range(4)))
    first = _ptrs(exports[0]["prefill"].program)
    assert all(_ptrs(export[name].program) == first for export in exports for name in export)


def test_one_copy_on_another_device(folder: Path) -> None:
    """On a device that every machine has: tensors without memory."""
    meta = torch.device("meta")
    export = ExportedModel.from_pretrained(folder)
    first, second = (export[name].program for name in ("prefill", "decode"))
    for program in (first, second):
        mapped.move_weights(program, meta)
    assert {tensor.device for tensor in first.state_dict.values()} == {meta}
    assert all(second.state_dict[name] is tensor for name, tensor in first.state_dict.items())
    assert isinstance(first.state_dict["lm_head.weight"], torch.nn.Parameter)
    weights = mapped._held[first]
    assert len(weights._elsewhere) > 10
    for program in (first, second):
        program.state_dict.clear()
    gc.collect()
    assert len(weights._elsewhere) == 0


def test_only_what_a_file_holds_is_moved(pair: ExportedModel) -> None:
    """Nothing is moved that the file doesn't hold."""
    program = pair["prefill"].program
    mapped.move_weights(program, torch.device("meta"))
    assert {tensor.device.type for tensor in program.state_dict.values()} == {"cpu"}


# ── tensors of every kind ───────────────────────────────────────────────────────────────────────────────────────────


class Odd(torch.nn.Module):
    """Weights that are views, share memory, or are no float32."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        base = random(8, 8)
        self.register_buffer("top", base[:5])
        self.register_buffer("bottom", base[3:])
        self.register_buffer("columns", random(8, 16)[:, 3:11])
        self.weight = torch.nn.Parameter(random(8, 8).t(), requires_grad=False)
        self.trained = torch.nn.Parameter(random(8))
        self.register_buffer("wide", random(8, 1).expand(8, 8))
        self.register_buffer("short", random(8).half())
        self.register_buffer("brain", random(8, 8).bfloat16().t())
        self.register_buffer("flag", torch.tensor([True, False] * 4))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("empty", torch.zeros(0, 8))
        bits = random(8)
        self.register_buffer("bits", bits)
        self.register_buffer("raw", bits.view(torch.int32))
        self.constant = random(30, 8)  # no buffer: a constant of the program

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ self.weight * self.trained + self.top.sum(0) + self.bottom.sum(0) + self.columns[0]
        z = (self.wide @ y.t()).sum() + self.short.float() + self.brain.float().sum(0) * self.count
        return (
            y, z * self.flag, self.empty.sum() + self.bits + self.raw, self.constant.sum(0) + self.weight.view(-1)[:8]
            if self.weight.is_contiguous() else self.constant.sum(0),
        )  # fmt: skip


class Sum(torch.nn.Module):
    """Another view of what `Odd` holds."""

    def __init__(self, odd: Odd) -> None:
        super().__init__()
        self.first, self.other = odd, torch.nn.Parameter(odd.weight[2:4])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.first.weight.sum() + self.other.sum() + self.first.top.sum()


def _programs() -> dict[str, torch.export.ExportedProgram]:
    odd = Odd().eval()
    x = torch.ones(2, 8)
    return {"odd": torch.export.export(odd, (x,)), "sum": torch.export.export(Sum(odd).eval(), (x,))}


def _load(programs: Any, folder: Path) -> dict[str, torch.export.ExportedProgram]:
    files = save_programs(programs, folder)
    return {
        name: load_program(folder / names[0], trust=False, beside=[folder / n for n in names[1:]])
        for name, names in files.items()
    }


def test_every_kind_of_tensor(tmp_path: Path) -> None:
    programs = _programs()
    loaded = _load(programs, tmp_path)
    x = torch.randn(2, 8)
    for name, program in programs.items():
        for home in ("state_dict", "constants"):
            before, after = getattr(program, home), getattr(loaded[name], home)
            assert before.keys() == after.keys()
            for key, tensor in before.items():
                other = after[key]
                assert type(other) is type(tensor), key
                assert other.requires_grad == tensor.requires_grad, key
                assert other.dtype == tensor.dtype, key
                assert torch.equal(other, tensor), key
                assert other.stride() == tensor.stride(), key
        torch.testing.assert_close(loaded[name].module()(x), program.module()(x), atol=1e-6, rtol=0)


def test_memory_stays_shared_as_it_was(tmp_path: Path) -> None:
    loaded = _load(_programs(), tmp_path)
    odd, total = loaded["odd"].state_dict, loaded["sum"].state_dict
    assert odd["bottom"].data_ptr() - odd["top"].data_ptr() == 3 * 8 * 4
    assert total["first.weight"].data_ptr() == odd["weight"].data_ptr()
    assert total["other"].data_ptr() - odd["weight"].data_ptr() == 2 * 4
    assert odd["wide"].stride() == (1, 0)
    stored = load_file(tmp_path / WEIGHTS_FILE)
    unique = {tensor.data_ptr(): tensor for tensor in odd.values()}
    assert sum(tensor.nbytes for tensor in stored.values()) < 1.3 * sum(
        min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in unique.values()
    )


class Named(torch.nn.Module):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def _named(**values: torch.Tensor) -> dict[str, torch.export.ExportedProgram]:
    return {name: torch.export.export(Named(value), (torch.ones(4),)) for name, value in values.items()}


def test_one_name_for_different_weights(tmp_path: Path) -> None:
    values = {"a": torch.ones(4), "b": torch.zeros(4), "c": torch.full((4,), 2.0)}
    loaded = _load(_named(**values), tmp_path)
    assert set(load_file(tmp_path / WEIGHTS_FILE)) == {"weight", "b.weight", "c.weight"}
    for name, value in values.items():
        assert torch.equal(loaded[name].module()(torch.zeros(4)), value)


def test_equal_weights_are_one(tmp_path: Path) -> None:
    """Programs of two runs hold copies; what differs in one bit does not count as equal."""
    value = torch.tensor([1.0, float("nan"), 0.0, 2.0])
    negative = torch.tensor([1.0, float("nan"), -0.0, 2.0])
    loaded = _load(_named(a=value, b=value.clone(), c=negative), tmp_path)
    a, b, c = (loaded[name].state_dict["weight"] for name in "abc")
    assert a.data_ptr() == b.data_ptr() != c.data_ptr()
    assert torch.signbit(c.detach()[2])
    assert len(load_file(tmp_path / WEIGHTS_FILE)) == 2


def test_large_weights_that_differ_in_one_place(tmp_path: Path) -> None:
    value, other = torch.zeros(100_000), torch.zeros(100_000)
    other[54_321] = 1
    tensors, _ = shared_weights(
        {name: torch.export.export(Named(x), (torch.ones(1),)) for name, x in (("a", value), ("b", other))}
    )
    assert len(tensors) == 2


class Counter(torch.nn.Module):
    def __init__(self, value: torch.Tensor, *, counts: bool = True, branch: bool = False) -> None:
        super().__init__()
        self.register_buffer("calls", value)
        self.counts, self.branch = counts, branch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.branch:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x + self.calls
        if self.counts:
            self.calls[1:].view(-1).add_(1)
        return x + self.calls


def test_what_a_program_writes_to_is_its_own(tmp_path: Path) -> None:
    value, x = torch.zeros(300), torch.zeros(300)
    programs = {
        "a": torch.export.export(Counter(value), (x,)),
        "b": torch.export.export(Counter(value.clone(), counts=False), (x,)),
        "c": torch.export.export(Counter(value.clone(), branch=True), (x,)),
    }
    tensors, places = shared_weights(programs)
    assert list(places["b"]) == list(places["c"]) == ["calls"]
    assert not places["a"]
    assert len(tensors) == 1
    loaded = _load(programs, tmp_path)
    assert loaded["a"].module()(x).sum() == 299
    assert loaded["b"].module()(x).sum() == 0


def test_programs_without_weights(tmp_path: Path) -> None:
    class Plain(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    programs = {name: torch.export.export(Plain(), (torch.ones(2),)) for name in "ab"}
    loaded = _load(programs, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt2", "b.pt2"]
    assert loaded["b"].module()(torch.ones(2)).tolist() == [2.0, 2.0]


def test_cache_of_the_step_is_the_models(folder: Path, tiny_llama: Any) -> None:
    step = _step(tiny_llama, batch=2)
    got = ExportedModel.from_pretrained(folder).caller("decode")(step)
    assert isinstance(got.cache, DynamicCache)
    assert got.cache.get_seq_length() == 6
