"""What a `.pt2` archive may hold to be loaded without trust.

Reading an archive can run code in more ways than its pickles (sample inputs, pickled tensors, custom objects):

* sizes are text that sympy evaluates, and guards are text that Python compiles;
* operators are looked up by attribute starting at the `torch` module, where `os` can be reached, and some operators take
  functions, or read and write files;
* names of values become names in generated Python source;
* the structure of a call may name classes and functions, which are imported.

So an archive must be what it seems to be to every reader (no entry twice, none of another name), and in its description
every text must be of the kind that its place allows: an identifier, a known operator, arithmetic over sizes.

Source: `torch/export/pt2_archive/_package.py`, `torch/_export/serde/serialize.py` and `torch/fx/graph.py` of torch 2.13.
"""

from __future__ import annotations

import functools
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.export.pt2_archive import PT2ArchiveReader

from polyport import structure
from polyport.errors import ArtifactError
from polyport_dynamo.expressions import is_guard, is_size, is_symbol

#: JSON above this size is no model's graph.
_MAX_JSON_BYTES = 1 << 30

_GRAPH = "models/model.json"
_WEIGHTS = "data/weights/model_weights_config.json"
_CONSTANTS = "data/constants/model_constants_config.json"
_SAMPLE = "data/sample_inputs/model.pt"

#: Entries that torch writes for a program without pickled content; all others are refused.
_ENTRY = re.compile(
    "|".join(map(re.escape, (_GRAPH, _WEIGHTS, _CONSTANTS, _SAMPLE)))
    + r"|data/weights/weight_\d+|data/constants/tensor_\d+|extra/[\w./-]+"
    + r"|archive_format|archive_version|byteorder|version|\.format_version|\.storage_alignment"
    + r"|\.data/(version|serialization_id)"
)

#: Operators that compute on tensors, and the arithmetic on sizes. Control flow takes graphs, which are checked too.
_OPERATOR = re.compile(
    r"torch\.ops\.(aten|prims|quantized_decomposed|torchao|torchvision|transformers)"
    r"\.(?!(from_file|save|load)\.)(__i?(and|or|xor|lshift|rshift)__|(?!__)\w+)\.(?!__)\w+"
    r"|torch\.ops\.higher_order\.(associative_scan|cond|invoke_subgraph|map_impl|scan|while_loop"
    r"|wrap_with_autocast|wrap_with_set_grad_enabled)"
    r"|_operator\.(add|and_|eq|floordiv|ge|gt|le|lshift|lt|mod|mul|ne|neg|or_|pos|pow|rshift|sub|truediv)"
    r"|torch\._?sym_[a-z]+|math\.trunc"
)

_IDENTIFIER = re.compile(r"([A-Za-z_]\w*)?")

#: Any other text: names of parameters, versions, kinds. It can't end a line or a quotation, nor call anything.
_PLAIN = re.compile(r"[\w.+:/-]*")


def check_archive(path: Path) -> None:
    """Check that torch can read an archive without running what it holds.

    Raises:
        ArtifactError: It is damaged, or holds something that needs `trust_remote_code=True`.
    """
    try:
        entries = _entries(path)
        # read by torch's own reader, so that what is checked is what will be loaded
        with PT2ArchiveReader(str(path)) as reader:
            if set(reader.get_file_names()) != entries.keys():
                raise _untrusted(path, "entries that readers of zip files disagree about")
            for name, check in _CHECKS.items():
                if entries.get(name, 0) > _MAX_JSON_BYTES:
                    raise ArtifactError(f"{path} holds a description larger than any model's.", stage="load")
                check(path, json.loads(reader.read_bytes(name)), entries)
    except ArtifactError:
        raise
    except Exception as error:  # whatever goes wrong in a damaged file
        raise ArtifactError(
            f"{path} is damaged: {type(error).__name__}: {error}.", stage="load", backend="dynamo"
        ) from error


def _entries(path: Path) -> dict[str, int]:
    """Every entry with its size, without the archive's own name in front."""
    with zipfile.ZipFile(path) as archive:
        listed = archive.infolist()
    entries: dict[str, int] = {}
    for entry in listed:
        folder, _, name = entry.filename.partition("/")
        if folder != listed[0].filename.partition("/")[0] or not _ENTRY.fullmatch(name):
            raise _untrusted(path, f"the entry {entry.filename!r}")
        if name in entries:
            raise _untrusted(path, f"the entry {entry.filename!r} twice")
        entries[name] = entry.file_size
    if entries.get(_SAMPLE):
        raise _untrusted(path, "pickled sample inputs")
    return entries


# ── weights ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_payload(path: Path, document: Any, entries: Mapping[str, int]) -> None:
    """The tensors that a list of weights or constants describes must be raw bytes in the archive."""
    for name, record in document["config"].items():
        if record["use_pickle"] is not False:
            raise _untrusted(path, f"the pickled tensor {name!r}")
        file = record["path_name"]
        if not isinstance(file, str) or not re.fullmatch(r"(weight|tensor)_\d+", file):
            raise _untrusted(path, f"the tensor {name!r} as {file!r}")
        _check_texts(path, record)
        size = next((entries[entry] for entry in entries if entry.endswith(f"/{file}")), None)
        sizes = [dim["as_int"] for dim in record["tensor_meta"]["sizes"]]
        if size is None or (size == 0 and 0 not in sizes):
            raise ArtifactError(f"{path} lacks the bytes of {name!r}.", stage="load", backend="dynamo")


# ── the graph ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_graph(path: Path, document: Any, _: Mapping[str, int]) -> None:
    _check_texts(path, document)
    for name, span in document["range_constraints"].items():
        limits = (span["min_val"], span["max_val"])
        if not is_symbol(name) or not all(limit is None or type(limit) in (int, float) for limit in limits):
            raise _untrusted(path, f"the range of {name!r}")


def _check_texts(path: Path, document: Any) -> None:
    """Every key and every text must be of the kind that its place allows."""
    for key, value in _pairs(document):
        if not _PLAIN.fullmatch(key):
            raise _untrusted(path, f"the name {key[:80]!r}")
        if key in ("custom_obj_values", "as_custom_obj") and value:
            raise _untrusted(path, "custom objects")
        if isinstance(value, str) and not _ALLOWED.get(key, _PLAIN.fullmatch)(value):
            raise _untrusted(path, f"{value[:80]!r} as `{key}`")
        if key in ("in_spec", "out_spec") and isinstance(value, str):
            structure.load_structure(value)


def _pairs(document: Any) -> Iterator[tuple[str, Any]]:
    """Every key with its value, at any depth; each item of a list under the key of the list.

    Left out is the metadata of nodes: texts about where they came from, which nothing evaluates.
    """
    stack: list[tuple[str, Any]] = [("", document)]
    while stack:
        key, value = stack.pop()
        yield key, value
        if isinstance(value, list):
            stack.extend((key, item) for item in value)
        elif isinstance(value, dict) and not (
            key == "metadata" and all(isinstance(x, str) for x in value.values())
        ):
            stack.extend(value.items())


def _anything(_: str) -> bool:
    return True


#: What the text under a key must be, where it isn't just plain.
_ALLOWED: dict[str, Callable[[str], Any]] = {
    "name": _IDENTIFIER.fullmatch,
    "as_name": _IDENTIFIER.fullmatch,
    "forward_arg_names": _IDENTIFIER.fullmatch,
    "target": _OPERATOR.fullmatch,
    "as_operator": _OPERATOR.fullmatch,
    "expr_str": functools.lru_cache(4096)(is_size),  # a graph has thousands, most of them alike
    "guards_code": is_guard,
    "as_string": _anything,  # arguments of operators, which are quoted where source is generated
    "as_strings": _anything,
    "in_spec": _anything,  # read by polyport.structure, with its closed list of classes
    "out_spec": _anything,
}

_CHECKS: dict[str, Callable[[Path, Any, Mapping[str, int]], None]] = {
    _GRAPH: _check_graph,
    _WEIGHTS: _check_payload,
    _CONSTANTS: _check_payload,
}


def _untrusted(path: Path, what: str) -> ArtifactError:
    return ArtifactError(
        f"{path} holds {what}, which can run code when it is loaded. If you trust its origin, load it with "
        "trust_remote_code=True.",
        stage="load",
        backend="dynamo",
    )
