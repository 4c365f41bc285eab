"""Models of every family that generates, from sample inputs to eager's tokens out of a saved export, in every format.

`tools/sweep.py --generate` runs the whole zoo; these are one of each family: an encoder-decoder over text and over speech,
a recurrent state and a hybrid of it, images among the tokens, and a model beside its language model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import polyport
from polyport import ExportedModel

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]

import sweep_generate  # noqa: E402
import zoo  # noqa: E402

FORMATS = ["dynamo", "onnx", "openvino"]

#: Case -> its components.
CASES = {
    "t5": ["encoder", "prefill", "decode"],
    "whisper": ["encoder", "prefill", "decode"],
    "mamba": ["prefill", "decode"],
    "jamba": ["prefill", "decode"],
    "llava": [
        "image_encoder", "multi_modal_projector", "embed_tokens", "language_model", "lm_head", "decode",
    ],
    "blip_2": ["image_encoder", "qformer", "language_projection", "embed_tokens", "prefill", "decode"],
}  # fmt: skip


@attrs.frozen
class Made:
    """A case with its exports, loaded from where they were saved."""

    case: str
    model: Any
    sample: zoo.Inputs
    exports: dict[str, ExportedModel]


def _cases(*names: str) -> Iterator[Any]:
    for name in names:
        yield pytest.param(name, marks=pytest.mark.xdist_group(f"generation {name}"))


@pytest.fixture(scope="module", params=_cases(*CASES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    model, _, sample = zoo.build(request.param)
    assert sample is not None
    folder = tmp_path_factory.mktemp(request.param)
    configs = [{"export_format": name, "dynamic": True} for name in FORMATS]
    exports = {}
    for name, export in polyport.export_for_generation(model, sample, configs).items():
        export.save_pretrained(folder / name)
        exports[name] = ExportedModel.from_pretrained(folder / name)
    return Made(request.param, model, sample, exports)


def _only(*cases: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("made", list(_cases(*cases)), indirect=True)


@pytest.mark.parametrize("export_format", FORMATS)
def test_the_loaded_export_generates_what_the_model_generates(made: Made, export_format: str) -> None:
    loaded = made.exports[export_format]
    assert list(loaded) == CASES[made.case]
    for shape, prompt in {"batch 1": made.sample, "padded batch": zoo.padded_prompts(made.case)}.items():
        for name, way in sweep_generate.WAYS.items():
            expected = sweep_generate.generated(made.model, prompt, way)
            result = sweep_generate.compare(expected, sweep_generate.generated(loaded, prompt, way))
            assert result["ok"], f"{name}, {shape}: {result['error']}"


@_only("t5", "mamba", "jamba")
@pytest.mark.parametrize("export_format", FORMATS)
def test_states_follow_their_beams(made: Made, export_format: str) -> None:
    prompt = zoo.padded_prompts(made.case)
    options = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 12, "min_new_tokens": 12}
    expected = made.model.generate(**prompt, **options)
    assert made.exports[export_format].generate(**prompt, **options).tolist() == expected.tolist()


@_only("t5", "mamba", "jamba")
@pytest.mark.parametrize("export_format", FORMATS)
def test_a_prompt_far_longer_than_the_sample(made: Made, export_format: str) -> None:
    ids = torch.randint(3, 100, (1, 40), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 6, "min_new_tokens": 6}
    expected = made.model.generate(ids, **options)
    assert made.exports[export_format].generate(ids, **options).tolist() == expected.tolist()


def _padded(ids: torch.Tensor, length: int, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    gap = length - ids.shape[1]
    both = (ids, torch.ones_like(ids))
    padded = [torch.nn.functional.pad(x, (gap, 0) if left else (0, gap)) for x in both]
    return padded[0], padded[1]


def _rows() -> Iterator[torch.Tensor]:
    for length in (4, 13, 7):
        yield torch.randint(3, 100, (1, length), generator=torch.Generator().manual_seed(length))


@_only("t5")
@pytest.mark.parametrize("export_format", FORMATS)
@pytest.mark.parametrize("gap", [3, 9])
def test_the_amount_of_padding_changes_nothing(made: Made, export_format: str, gap: int) -> None:
    loaded, ids = made.exports[export_format], next(_rows())
    options = {"max_new_tokens": 8, "min_new_tokens": 8}
    for left in (False, True):
        padded, mask = _padded(ids, 4 + gap, left=left)
        expected = made.model.generate(padded, attention_mask=mask, **options)
        assert loaded.generate(padded, attention_mask=mask, **options).tolist() == expected.tolist()
        assert loaded.generate(ids, **options).tolist() == expected.tolist()


@_only("t5", "mamba", "jamba")
@pytest.mark.parametrize("export_format", FORMATS)
def test_what_else_is_in_the_batch_changes_nothing(made: Made, export_format: str) -> None:
    loaded, rows = made.exports[export_format], list(_rows())
    options = {"max_new_tokens": 8, "min_new_tokens": 8}
    left = made.case != "t5"
    padded = [_padded(row, 13, left=left) for row in rows]
    ids, mask = (torch.cat([pair[index] for pair in padded]) for index in (0, 1))
    together = loaded.generate(ids, attention_mask=mask, **options)
    for row, got in zip(rows, together, strict=True):
        alone = loaded.generate(row, **options)[0]
        assert got[-8:].tolist() == alone[-8:].tolist()
        assert alone.tolist() == made.model.generate(row, **options)[0].tolist()


@_only("t5")
@pytest.mark.parametrize("export_format", FORMATS)
def test_encoder_results_may_be_given(made: Made, export_format: str) -> None:
    loaded, ids = made.exports[export_format], next(_rows())
    options = {"max_new_tokens": 8, "min_new_tokens": 8}
    with torch.no_grad():
        encoded = made.model.get_encoder()(input_ids=ids)
    mask = torch.ones_like(ids)
    got = loaded.generate(encoder_outputs=encoded, attention_mask=mask, **options)
    assert got.tolist() == made.model.generate(ids, **options).tolist()


@_only("llava")
@pytest.mark.parametrize("export_format", FORMATS)
def test_text_alone(made: Made, export_format: str) -> None:
    """The prompt runs through the model's own code, which leaves the image out where there is none."""
    ids = next(_rows())
    options = {"max_new_tokens": 8, "min_new_tokens": 8}
    got = made.exports[export_format].generate(ids, **options)
    assert got.tolist() == made.model.generate(ids, **options).tolist()
