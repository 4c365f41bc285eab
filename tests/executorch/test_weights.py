"""Each weight lies in an export once, whoever reads it and in how many graphs."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.runtime import Runtime
from transformers import LlamaConfig, LlamaForCausalLM

from polyport import ExportedModel
from polyport_executorch import ExecutorchConfig, ExecutorchExporter
from polyport_executorch.artifact import in_one, load_program
from polyport_executorch.weights import ALIGNMENT, Pieces, without_repeats

SAMPLE = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
WAYS = ("one", "two", "two, stateful")


@pytest.fixture(scope="module")
def tied() -> Any:
    """Most of its weights are an embedding that is the last layer too."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def made(tied: Any) -> dict[str, ExportedModel]:
    return {
        way: ExecutorchExporter().export_for_generation(
            tied,
            SAMPLE,
            ExecutorchConfig(dynamic=True, stateful="stateful" in way, max_sizes={"batch": 2}),
            multi_token_decode=way == "one",
        )
        for way in WAYS
    }


@pytest.fixture(scope="module")
def folders(made: dict[str, ExportedModel], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("weights")
    for way, exported in made.items():
        exported.save_pretrained(root / way)
    return {way: root / way for way in WAYS}


def _pieces(program: Any) -> Pieces:
    pieces = Pieces()
    program.write_to_file(pieces)
    return pieces


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_there_once(tied: Any, folders: dict[str, Path], way: str) -> None:
    embedding = tied.get_input_embeddings().weight.detach()
    others = sum(weight.nbytes for weight in tied.parameters()) - embedding.nbytes
    (file,) = folders[way].glob("*.pte")
    content = file.read_bytes()
    assert content.count(embedding.numpy().tobytes()) == 1
    layer = tied.model.layers[0].mlp.up_proj.weight.detach()
    assert content.count(layer.numpy().tobytes()) == 1
    assert len(content) < embedding.nbytes + others + 150_000


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("length", [2, 9])
def test_same_ids_after_save(tied: Any, folders: dict[str, Path], way: str, batch: int, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, 4096, (batch, length), generator=generator)
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    prompt["attention_mask"][-1, 0] = 0
    expected = tied.generate(**prompt, **OPTIONS)
    exported = ExportedModel.from_pretrained(folders[way])
    assert exported.generate(**prompt, **OPTIONS).tolist() == expected.tolist()


@pytest.mark.parametrize("way", WAYS)
def test_saved_again(
    made: dict[str, ExportedModel], folders: dict[str, Path], way: str, tmp_path: Path
) -> None:
    before = {path.name: path.read_bytes() for path in folders[way].iterdir()}
    ExportedModel.from_pretrained(folders[way]).save_pretrained(tmp_path / "loaded")
    made[way].save_pretrained(tmp_path / "fresh")
    for again in ("loaded", "fresh"):
        assert {path.name: path.read_bytes() for path in (tmp_path / again).iterdir()} == before


def test_components_are_methods_of_one_file(folders: dict[str, Path]) -> None:
    files = {way: [path.name for path in folders[way].glob("*.pte")] for way in WAYS}
    assert files == {"one": ["decode.pte"], "two": ["model.pte"], "two, stateful": ["model.pte"]}
    methods = {
        way: Runtime.get().load_program(folders[way] / names[0]).method_names for way, names in files.items()
    }
    assert methods == {
        "one": {"forward"},
        "two": {"prefill", "decode"},
        "two, stateful": {"prefill", "decode", "decode_state"},
    }


def test_executorch_reads_it_alone(
    tied: Any, made: dict[str, ExportedModel], folders: dict[str, Path]
) -> None:
    program = Runtime.get().load_program(folders["two"] / "model.pte")
    prefill = program.load_method("prefill")
    assert prefill is not None
    names = made["two"]["prefill"].metadata.input_names
    ids = torch.tensor([[9, 8, 7, 6]])
    given = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(4)[None],
        "logits_to_keep": torch.tensor([3]),
    }
    got = prefill.execute([given[name] for name in names])
    with torch.no_grad():
        expected = tied(input_ids=ids).logits[:, -1:]
    (logits,) = [one for one in got if one.shape == expected.shape]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_parts_of_two_exports(tied: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    """A prefill and a step that come from different files stay in files of their own."""
    two, other = (ExportedModel.from_pretrained(folders[way]) for way in ("two", "two, stateful"))
    mixed = ExportedModel(
        "executorch",
        {"prefill": two["prefill"], "decode": other["decode"]},
        config=two.config,
        generation_config=two.generation_config,
        generation=two.generation,
        leftovers=two.leftovers,
    )
    mixed.save_pretrained(tmp_path / "both")
    assert sorted(path.name for path in (tmp_path / "both").glob("*.pte")) == ["decode.pte", "model.pte"]
    loaded = ExportedModel.from_pretrained(tmp_path / "both")
    ids = {"input_ids": torch.tensor([[9, 8, 7, 6]])}
    assert loaded.generate(**ids, **OPTIONS).tolist() == tied.generate(**ids, **OPTIONS).tolist()


# ── the layout ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_twice_is_once(made: dict[str, ExportedModel]) -> None:
    pieces = without_repeats(_pieces(made["one"]["decode"].program))
    assert b"".join(without_repeats(pieces)) == b"".join(pieces)


def test_pieces_are_not_changed(made: dict[str, ExportedModel]) -> None:
    pieces = _pieces(made["one"]["decode"].program)
    before = list(pieces)
    left = without_repeats(pieces)
    assert pieces == before
    assert sum(map(len, left)) < sum(map(len, pieces))


def test_segments_stay_aligned(folders: dict[str, Path]) -> None:
    """The header tells where segments start and how long they are: delegates and the runtime map them from there."""
    content = (folders["two"] / "model.pte").read_bytes()
    magic, _, _, base, size = struct.unpack_from("<4sIQQQ", content, 8)
    assert magic == b"eh00"
    assert base % ALIGNMENT == 0
    assert base + size == len(content)


class _Shift(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.tensor([0.25, -1.5, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(x + self.by, -1)


@pytest.mark.parametrize("delegated", [False, True])
def test_programs_of_other_origins(delegated: bool, tmp_path: Path) -> None:
    """Without delegates nothing has a name; with other options of ExecuTorch, constants may lie anywhere."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    model, x = _Shift(), torch.tensor([[1.0, 2.0, 4.0]])
    program = torch.export.export(model, (x,))
    manager = to_edge_transform_and_lower(
        program, partitioner=[XnnpackPartitioner()] if delegated else None
    ).to_executorch()
    (tmp_path / "model.pte").write_bytes(b"".join(without_repeats(_pieces(manager))))
    method = load_program(tmp_path / "model.pte").load_method("forward")
    assert method is not None
    torch.testing.assert_close(method.execute((x,))[0], model(x), atol=1e-6, rtol=0)


def test_delegates_that_name_different_data_alike(made: dict[str, ExportedModel], monkeypatch: Any) -> None:
    """Their programs can't be one; each gets a file."""
    from executorch.exir._serialize._named_data_store import NamedDataStore

    programs = {name: component.program for name, component in made["two"].components.items()}
    first, second = programs.values()
    for program, data in ((first, b"a" * 64), (second, b"b" * 64)):
        store = NamedDataStore()
        store.add_named_data("blob", data)
        monkeypatch.setattr(program, "_named_data", store.get_named_data_store_output())
    assert in_one(programs) is None
