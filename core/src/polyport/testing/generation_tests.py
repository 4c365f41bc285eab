"""Generation: does an export write what the model writes?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from polyport.artifact import ExportedModel
from polyport.testing.capabilities import needs
from polyport.testing.models import EXAMPLES
from polyport.testing.suite import Suite
from polyport.testing.workbench import Workbench

#: How many tokens are written, all of them whatever they are.
_OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


class GenerationTests(Suite):
    """Exports for generation, of the small decoder."""

    @needs(supports_dynamic=True)
    def test_generates_what_the_model_generates(self, workbench: Workbench, tmp_path: Path) -> None:
        """A prefill and a decode step, saved and loaded: the model's own tokens, greedily and with beams, also for a padded batch.

        On failure: if only the tokens after the first are wrong, the decode step lost the cache: it comes in and goes out as
        leaves (`cache.layers.0.keys`), in the order of the metadata. If only the padded batch is, the mask was lost or its
        length is taken for that of the new tokens.
        """
        model = _writer()
        exported = workbench.export_generation(model)
        assert list(exported) == ["prefill", "decode"]
        exported.save_pretrained(tmp_path / "export")
        _assert_same_tokens(model, workbench.load(tmp_path / "export"))

    @needs(supports_dynamic=True)
    def test_generates_with_a_static_cache(self, workbench: Workbench, tmp_path: Path) -> None:
        """One graph for prompts and steps, on buffers that it writes to where they lie.

        On failure: inputs that `metadata.in_place` names must have their new content after the call, in the caller's tensors.
        If your runtime can't write to them, return the content and copy it.
        """
        from transformers import GenerationConfig

        static = GenerationConfig(cache_implementation="static", max_cache_len=24)  # type: ignore[no-untyped-call]
        model = _writer()
        exported = workbench.export_generation(model, static, multi_token_decode=True)
        assert list(exported) == ["decode"]
        changed = {name.rpartition(".")[2] for name in exported["decode"].metadata.in_place}
        assert changed == {"keys", "values", "cumulative_length"}, "in_place"
        exported.save_pretrained(tmp_path / "export")
        _assert_same_tokens(model, workbench.load(tmp_path / "export"))


def _writer() -> Any:
    model = EXAMPLES["decoder"].build()
    model.config.use_cache = model.generation_config.use_cache = True
    return model


def _assert_same_tokens(model: Any, exported: ExportedModel) -> None:
    for case, kwargs in EXAMPLES["decoder"].cases().items():
        for beams in (1, 3):
            with torch.no_grad():
                expected = model.generate(**kwargs, num_beams=beams, **_OPTIONS)
            got = exported.generate(**kwargs, num_beams=beams, **_OPTIONS)
            if not torch.equal(got, expected):
                pytest.fail(f"{case}, {beams} beams: writes {got.tolist()}, the model {expected.tolist()}")
