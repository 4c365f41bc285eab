"""What our archives hold, and what is refused in those of others."""

from __future__ import annotations

import contextlib
import copy
import getpass
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from polyport import ExportedModel
from polyport.errors import ArtifactError
from polyport_dynamo.archive import load_program, save_program

GRAPH = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
SAMPLE = "data/sample_inputs/model.pt"


def _entries(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def _write(path: Path, entries: Mapping[str, bytes], folder: str = "model/") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(folder + name, content)
    return path


def _changed(saved: Path, path: Path, change: Callable[[Any], None], entry: str = GRAPH) -> Path:
    """The archive with something in one of its JSON documents changed."""
    entries = _entries(saved / "model.pt2")
    document = json.loads(entries[entry])
    change(document)
    return _write(path / "changed.pt2", {**entries, entry: json.dumps(document).encode()})


def _nodes(document: Any) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = document["graph_module"]["graph"]["nodes"]
    return nodes


def _first(value: Any, key: str) -> dict[str, Any]:
    """The first object in a document that has the key."""
    if isinstance(value, dict):
        if key in value:
            return value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            if found := _first(item, key):
                return found
    return {}


# ── ours ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_pickles(saved: Path) -> None:
    for name, content in _entries(saved / "model.pt2").items():
        assert not name.endswith((".pt", ".pkl")) or content == b"", name
        assert not content.startswith((b"\x80\x02", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")), name
        if name.endswith(".json"):
            json.loads(content)


def test_sample_inputs_are_not_in_it(saved: Path, exported: ExportedModel) -> None:
    assert _entries(saved / "model.pt2")[SAMPLE] == b""
    assert exported.program.example_inputs is not None  # the program in memory keeps its own


def test_nothing_of_this_machine(saved: Path) -> None:
    content = (saved / "model.pt2").read_bytes() + (saved / "export.json").read_bytes()
    for path in (Path(torch.__file__).parent.parent, Path(__file__).parents[2], Path.home()):
        assert os.fsencode(path) not in content
    for text in ('File \\"', 'File "', ".py", "stack_trace", f"/{getpass.getuser()}/"):
        assert text.encode() not in content, text


def test_same_bytes_twice(exported: ExportedModel, saved: Path, tmp_path: Path) -> None:
    exported.save_pretrained(tmp_path / "again")
    for name in ("model.pt2", "export.json"):
        assert (tmp_path / "again" / name).read_bytes() == (saved / name).read_bytes()


def test_same_bytes_from_a_loaded_export(saved: Path, tmp_path: Path) -> None:
    ExportedModel.from_pretrained(saved).save_pretrained(tmp_path / "again")
    first, again = _entries(saved / "model.pt2"), _entries(tmp_path / "again" / "model.pt2")
    assert {name: again[name] for name in again if name.startswith("data/weights/weight_")} == {
        name: first[name] for name in first if name.startswith("data/weights/weight_")
    }


FRESH = """
import sys, torch
from transformers import BertConfig, BertModel
from polyport import DynamoConfig, DynamoExporter

torch.manual_seed(0)
config = BertConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                    max_position_embeddings=64)
model = BertModel(config).eval()
ids = torch.ones(1, 5, dtype=torch.int64)
inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
DynamoExporter().export(model, inputs, DynamoConfig(dynamic=True)).save_pretrained(sys.argv[1])
"""


def test_same_bytes_from_a_fresh_process(saved: Path, tmp_path: Path) -> None:
    """Nothing of the process is in it: no addresses, no order of hashes, no counters."""
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path)], env=environment, check=True, capture_output=True
    )
    for name in ("model.pt2", "export.json", "config.json"):
        assert (tmp_path / name).read_bytes() == (saved / name).read_bytes(), name


def test_loads_without_trust(saved: Path, tiny_bert: Any, token_ids: Any) -> None:
    inputs = token_ids(3, 7)
    with torch.no_grad():
        expected = tiny_bert(**inputs)
    got = ExportedModel.from_pretrained(saved)(**inputs)
    torch.testing.assert_close(got.last_hidden_state, expected.last_hidden_state, atol=1e-6, rtol=0)
    torch.testing.assert_close(got.pooler_output, expected.pooler_output, atol=1e-6, rtol=0)


def test_loading_does_not_turn_it_into_a_module_that_fails(saved: Path, token_ids: Any) -> None:
    """Who takes the program out of the export can use it as torch means it, guards and all."""
    program = load_program(saved / "model.pt2", trust=False)
    output = program.module()(**token_ids(2, 6))
    assert output.last_hidden_state.shape == (2, 6, 32)


def test_rewritten_archives_still_load(saved: Path, tmp_path: Path) -> None:
    """The hostile archives below differ from this one in one thing each."""
    load_program(_changed(saved, tmp_path, lambda document: None), trust=False)


# ── of others, and harmless ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `torch.export.save` writes: the sample inputs are a pickle."""
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    path = tmp_path_factory.mktemp("foreign") / "model.pt2"
    torch.export.save(program, path)
    return path


def test_pickled_sample_inputs_need_trust(foreign: Path) -> None:
    with pytest.raises(
        ArtifactError, match=r"holds pickled sample inputs, which can run code.*trust_remote_code=True"
    ):
        load_program(foreign, trust=False)
    assert load_program(foreign, trust=True).module()(torch.ones(1, 2)).shape == (1, 2)


def test_without_them_it_needs_none(foreign: Path, tmp_path: Path) -> None:
    path = _write(tmp_path / "model.pt2", {**_entries(foreign), SAMPLE: b""})
    assert isinstance(load_program(path, trust=False), torch.export.ExportedProgram)


def test_control_flow_and_autocast_are_harmless(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = x @ x
            with torch.no_grad():
                x = x.float() + 1
            return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    program = torch.export.export(Model(), (torch.ones(2, 2),))
    save_program(program, tmp_path / "model.pt2")
    loaded = load_program(tmp_path / "model.pt2", trust=False)
    x = torch.ones(2, 2)
    torch.testing.assert_close(loaded.module()(x), program.module()(x), atol=0, rtol=0)


def test_size_expressions_are_harmless(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            n = (x.shape[0] + 3) // 2 * max(x.shape[1], 4) % 7 - min(x.shape[0], y.shape[0] // 3)
            return torch.cat([x.flatten(), y.flatten(), torch.ones(n + 40)])

    shapes = {"x": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}, "y": {0: torch.export.Dim.AUTO}}
    program = torch.export.export(Model(), (torch.ones(6, 5), torch.ones(9, 2)), dynamic_shapes=shapes)
    save_program(program, tmp_path / "model.pt2")
    loaded = load_program(tmp_path / "model.pt2", trust=False)
    inputs = (torch.ones(8, 6), torch.ones(12, 2))
    assert loaded.module()(*inputs).shape == program.module()(*inputs).shape


# ── of others, and hostile ──────────────────────────────────────────────────────────────────────────────────────────


class _Touch:
    """A pickle that creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_what_a_pickle_can_do(foreign: Path, tmp_path: Path) -> None:
    """The reason for asking for trust: with it, the archive's code runs."""
    payload = pickle.dumps(_Touch(tmp_path / "ran"))
    path = _write(tmp_path / "model.pt2", {**_entries(foreign), SAMPLE: payload})
    with pytest.raises(ArtifactError, match="pickled sample inputs"):
        load_program(path, trust=False)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ArtifactError):  # it isn't sample inputs after all
        load_program(path, trust=True)
    assert (tmp_path / "ran").exists()


def test_what_an_expression_can_do(saved: Path, tmp_path: Path) -> None:
    """Sizes are text that sympy evaluates; the same file loads with trust, and runs it."""

    def change(document: Any) -> None:
        _first(document, "expr_str")["expr_str"] = (
            f"__import__('pathlib').Path('{tmp_path / 'ran'}').touch() or 5"
        )

    path = _changed(saved, tmp_path, change)
    with pytest.raises(ArtifactError, match="`expr_str`"):
        load_program(path, trust=False)
    assert not (tmp_path / "ran").exists()
    with contextlib.suppress(ArtifactError):
        load_program(path, trust=True)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "eval('1')",
        "exec('1')",
        "open('x', 'w')",
        "S('1+1')",
        "sympify('1')",
        "Lambda(x, 1)",
        "Symbol('__import__(\"os\")')",
        "Symbol('s0; 1')",
        "Float('__import__')",
        "Function('f')",
        "Matrix(1, 1, eval)",
        "s0.__class__",
        "s0.subs(1, 2)",
        "[x for x in (1,)]",
        "(lambda: 1)()",
        "'text'",
        "f'{1}'",
        "s0 if s0 else s1",
        "s0[0]",
        "Integer(*[1])",
        "Integer(1, **{})",
        "Integer(1, x=eval)",
        "s99999999999",
        "1;2",
        "",
        "(" * 5000,
    ],
)
def test_expressions_that_are_more_than_arithmetic(saved: Path, tmp_path: Path, text: str) -> None:
    def change(document: Any) -> None:
        _first(document, "expr_str")["expr_str"] = text

    with pytest.raises(ArtifactError):
        load_program(_changed(saved, tmp_path, change), trust=False)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "exec('1')",
        "L['input_ids'].__class__",
        "L['input_ids'].numpy().tofile('x')",
        "L.__class__",
        "torch.hub.load('a', 'b')",
        "torch.os.system('true')",
        "torch.load(L['x'])",
        "math.os",
        "getattr(L, 'x')",
        "(lambda: 1)()",
        "[0][0]",
        "L['x'].size()[0] == 'text'",
        "L[L]",
        "x := 1",
        "import os",
    ],
)
def test_guards_that_are_more_than_comparisons(saved: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(ArtifactError, match="`guards_code`"):
        load_program(
            _changed(saved, tmp_path, lambda document: document["guards_code"].append(text)), trust=False
        )


@pytest.mark.parametrize(
    "target",
    [
        "torch.os.system",
        "torchx.os.system",
        "torch.hub.load",
        "torch.load",
        "torch.ops.load_library",
        "torch.ops.aten.from_file.default",
        "torch.ops.aten.save.default",
        "torch.ops.aten.__class__.__init__",
        "torch.ops.prim.RaiseException.default",
        "torch.ops.evil.op.default",
        "torch.ops.higher_order.strict_mode",
        "torch.ops.higher_order.wrap",
        "torch.ops.higher_order.triton_kernel_wrapper_mutation",
        "torch._C._jit_get_all_schemas",
        "builtins.eval",
        "_operator.methodcaller",
        "_operator.attrgetter",
        "operator.eq",
        "math.factorial",
        "#evil:op",
        "os.system",
        "eval",
        "",
    ],
)
@pytest.mark.parametrize("place", ["target", "as_operator"])
def test_operators_that_are_none(saved: Path, tmp_path: Path, target: str, place: str) -> None:
    """Called as nodes, or handed to operators that call what they get."""

    def change(document: Any) -> None:
        node = _nodes(document)[-1]
        if place == "target":
            node["target"] = target
        else:
            node["inputs"][0]["arg"] = {"as_operator": target}

    with pytest.raises(ArtifactError, match=f"`{place}`"):
        load_program(_changed(saved, tmp_path, change), trust=False)


@pytest.mark.parametrize(
    "name", ["x = print('ran') or x", "x: print('ran')", "x)\n    print('ran'", "x y", "a.b", "1x"]
)
def test_names_become_source(saved: Path, tmp_path: Path, name: str) -> None:
    """Torch writes names of inputs, arguments and values into Python source as they are."""

    def rename_argument(document: Any) -> None:
        next(node for node in _nodes(document) if node["inputs"])["inputs"][0]["name"] = name

    def rename_input(document: Any) -> None:
        document["graph_module"]["graph"]["inputs"][0]["as_tensor"]["name"] = name

    def rename_node(document: Any) -> None:
        _nodes(document)[0]["name"] = name

    def rename_parameter(document: Any) -> None:
        document["graph_module"]["module_call_graph"][0]["signature"]["forward_arg_names"][0] = name

    for change in (rename_argument, rename_input, rename_node, rename_parameter):
        with pytest.raises(ArtifactError, match="trust_remote_code"):
            load_program(_changed(saved, tmp_path, change), trust=False)


def test_structures_that_import(saved: Path, tmp_path: Path) -> None:
    """Torch imports what a defaultdict or an enumeration in a call's structure names."""
    leaf = {"type": None, "context": None, "children_spec": []}
    factory = {"default_factory_module": "os", "default_factory_name": "getcwd", "dict_context": ["a"]}
    for context in (json.dumps(factory), json.dumps([{"__enum__": True, "fqn": "os:getcwd", "name": "x"}])):
        for kind in ("collections.defaultdict", "builtins.dict", "builtins.tuple"):
            text = json.dumps([1, {"type": kind, "context": context, "children_spec": [leaf]}])

            def change(document: Any, text: str = text) -> None:
                document["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = text

            with pytest.raises(ArtifactError):
                load_program(_changed(saved, tmp_path, change), trust=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["range_constraints"].update({"u99999999999": {"min_val": 0, "max_val": 1}}),
        lambda d: d["range_constraints"].update({"s0": {"min_val": "eval", "max_val": 1}}),
        lambda d: d["graph_module"]["graph"].update(
            custom_obj_values={"x": {"name": "x", "class_fqn": "evil"}}
        ),
        lambda d: _nodes(d)[0]["inputs"].append(
            {"name": "", "arg": {"as_custom_obj": {"name": "x", "class_fqn": "y"}}}
        ),
        lambda d: d["graph_module"]["graph"]["tensor_values"].update({"x'); evil(": {}}),
    ],
)
def test_other_things(saved: Path, tmp_path: Path, change: Callable[[Any], None]) -> None:
    with pytest.raises(ArtifactError, match="trust_remote_code"):
        load_program(_changed(saved, tmp_path, change), trust=False)


@pytest.mark.parametrize(
    "change",
    [
        {"use_pickle": True},
        {"use_pickle": 1},
        {"use_pickle": None},
        {"path_name": "custom_obj_0"},
        {"path_name": "opaque_obj_0"},
        {"path_name": "../../secret"},
        {"path_name": "weight_999"},
    ],
)
def test_weights_that_are_no_bytes(saved: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    def apply(document: Any) -> None:
        next(iter(document["config"].values())).update(change)

    with pytest.raises(ArtifactError):
        load_program(_changed(saved, tmp_path, apply, WEIGHTS), trust=False)


def test_a_weight_of_no_bytes_that_claims_to_be_large(saved: Path, tmp_path: Path) -> None:
    """Torch would fill it with zeros, whatever memory that takes."""
    entries = _entries(saved / "model.pt2")
    path = _write(tmp_path / "model.pt2", {**entries, "data/weights/weight_0": b""})
    with pytest.raises(ArtifactError, match="lacks the bytes"):
        load_program(path, trust=False)


@pytest.mark.parametrize(
    "name",
    [
        "models/other.json",
        "models/model.jsoN",
        "models/model.json5",
        "data/weights/model.pt",
        "data/weights/weight_0.pkl",
        "data/constants/custom_obj_0",
        "data/constants/opaque_obj_0",
        "data/aotinductor/model/model.so",
        "data/sample_inputs/other.pt",
        "data/weights/../../x",
        "code/evil.py",
        "../escaped",
    ],
)
def test_entries_that_do_not_belong(saved: Path, tmp_path: Path, name: str) -> None:
    path = _write(tmp_path / "model.pt2", {**_entries(saved / "model.pt2"), name: b"{}"})
    with pytest.raises(ArtifactError, match=r"holds the entry"):
        load_program(path, trust=False)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_entry_twice(saved: Path, tmp_path: Path) -> None:
    """Readers differ in which of the two they take."""
    path = _write(tmp_path / "model.pt2", _entries(saved / "model.pt2"))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"model/{GRAPH}", b"{}")
    with pytest.raises(ArtifactError, match="twice"):
        load_program(path, trust=False)


def test_the_older_layout_is_pickled(saved: Path, tmp_path: Path) -> None:
    """Torch falls back to it when the newer one fails, so it must not hide beside it."""
    path = _write(tmp_path / "model.pt2", _entries(saved / "model.pt2"))
    with zipfile.ZipFile(path, "a") as archive:
        for name in ("version", "serialized_state_dict.pt", "serialized_exported_program.json"):
            archive.writestr(name, b"8.1")
    with pytest.raises(ArtifactError, match="entry 'version'"):
        load_program(path, trust=False)


# ── damaged ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("size", [0, 10, 1000, -1000, -1])
def test_truncated(saved: Path, tmp_path: Path, size: int, trust: bool) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes((saved / "model.pt2").read_bytes()[:size])
    with pytest.raises(ArtifactError, match=r"model\.pt2"):
        load_program(path, trust=trust)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"config": 3}', b"\xff\xfe", b"[" * 100_000]
)
@pytest.mark.parametrize("entry", [GRAPH, WEIGHTS])
def test_damaged_documents(saved: Path, tmp_path: Path, entry: str, content: bytes) -> None:
    path = _write(tmp_path / "model.pt2", {**_entries(saved / "model.pt2"), entry: content})
    with pytest.raises(ArtifactError):
        load_program(path, trust=False)


@pytest.mark.parametrize("entry", [GRAPH, WEIGHTS, SAMPLE, "data/weights/weight_0", "archive_version"])
def test_missing_entries(saved: Path, tmp_path: Path, entry: str) -> None:
    entries = copy.copy(_entries(saved / "model.pt2"))
    del entries[entry]
    with pytest.raises(ArtifactError):
        load_program(_write(tmp_path / "model.pt2", entries), trust=False)


def test_not_an_archive(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(pickle.dumps(_Touch(tmp_path / "ran")))
    with pytest.raises(ArtifactError, match="is damaged"):
        load_program(tmp_path / "model.pt2", trust=False)
    assert not (tmp_path / "ran").exists()


def test_in_an_export_the_sum_comes_first(saved: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(saved, tmp_path / "export")
    path = _changed(saved, tmp_path, lambda document: document.update(guards_code=["exec('1')"]))
    shutil.copy(path, tmp_path / "export" / "model.pt2")
    with pytest.raises(ArtifactError, match=r"bytes where|SHA-256"):
        ExportedModel.from_pretrained(tmp_path / "export")
