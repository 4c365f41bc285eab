"""Comparing the answers of an export with those of its model."""

from __future__ import annotations

import copy
from typing import Any

import torch

from polyport.errors import InputError
from polyport.generation.proof import compare_answers


def test_the_same_model_answers_the_same(tiny_llama: Any, token_ids: Any) -> None:
    report = compare_answers(tiny_llama, copy.deepcopy(tiny_llama), token_ids(1, 7))
    assert report.passed
    assert [case.name for case in report.cases] == ["answer", "left padding"]
    assert all(output.max_abs == 0 for case in report.cases for output in case.outputs)


def test_another_model_answers_otherwise(tiny_llama: Any, token_ids: Any) -> None:
    other = copy.deepcopy(tiny_llama)
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight.mul_(1.2)
    report = compare_answers(tiny_llama, other, token_ids(1, 7))
    assert not report.passed
    assert "values differ" in report.cases[0].outputs[0].reason


def test_an_export_that_stops_differs(tiny_llama: Any, token_ids: Any) -> None:
    class Broken:
        def generate(self, **_: Any) -> None:
            raise InputError("No room.")

    report = compare_answers(tiny_llama, Broken(), token_ids(1, 7))
    assert [case.error for case in report.cases] == ["No room.", "No room."]
    assert not report.passed
