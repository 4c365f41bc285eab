"""Calling an export: what it accepts, what it refuses and how, several threads, devices."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from polyport import structure
from polyport.errors import InputError
from polyport.testing.suite import Suite
from polyport.testing.workbench import Workbench, quietly

_Kwargs = dict[str, Any]


def _each(convert: Callable[[torch.Tensor], Any]) -> Callable[[_Kwargs], _Kwargs]:
    return lambda kwargs: {name: convert(value) for name, value in kwargs.items()}


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, every second in memory."""
    return torch.stack([tensor, tensor + 1], dim=-1)[..., 0]


#: Other forms of the same inputs.
_FORMS: Mapping[str, Callable[[_Kwargs], _Kwargs]] = {
    "int32": _each(lambda x: x.to(torch.int32) if not x.is_floating_point() else x),
    "bool mask": lambda kwargs: {n: x.bool() if n == "attention_mask" else x for n, x in kwargs.items()},
    "numpy": _each(lambda x: x.numpy()),
    "numpy, read-only and strided": _each(lambda x: np.broadcast_to(x.numpy()[None], (2, *x.shape))[0]),
    "lists": _each(lambda x: x.tolist()),
    "not contiguous": _each(_strided),
    "with gradients": _each(lambda x: x.clone().requires_grad_() if x.is_floating_point() else x),
    "None for what is left out": lambda kwargs: {**kwargs, "inputs_embeds": None, "return_dict": None},
}


class CallTests(Suite):
    """Calls of a loaded export."""

    @pytest.mark.parametrize("form", list(_FORMS))
    def test_inputs_in_other_forms(self, workbench: Workbench, example: str, form: str) -> None:
        """Integers of another width, bools, arrays, lists and strided tensors give the same answer.

        On failure: core converts inputs before your runner sees them, so the runner most likely looks at the caller's
        memory: rely on what `polyport.pipeline.Runner` promises, and on nothing else.
        """
        kwargs = workbench.cases(example)["sample's sizes"]
        got = quietly(workbench.loaded(example), _FORMS[form](kwargs))
        workbench.assert_same(workbench.expected(example, kwargs), got)

    def test_mask_may_be_left_out(self, workbench: Workbench, example: str) -> None:
        """What the metadata lists in `defaults` is filled in.

        On failure: keep `defaults` of `traced.metadata`.
        """
        kwargs = workbench.cases(example)["sample's sizes"]
        defaults = workbench.loaded(example)["model"].metadata.defaults
        assert set(defaults) == set(kwargs) & {"attention_mask"}
        left = {name: value for name, value in kwargs.items() if name not in defaults}
        workbench.assert_same(workbench.expected(example, kwargs), quietly(workbench.loaded(example), left))

    def test_missing_input_is_named(self, workbench: Workbench, example: str) -> None:
        """Leaving out an input that has no default is an `InputError` that names it.

        On failure: `metadata.inputs` must list every input of the graph, under the model's own names.
        """
        exported = workbench.loaded(example)
        kwargs = workbench.cases(example)["sample's sizes"]
        for missing in kwargs.keys() - exported["model"].metadata.defaults.keys():
            with pytest.raises(InputError, match=missing):
                exported(**{name: value for name, value in kwargs.items() if name != missing})

    def test_wrong_rank_is_named(self, workbench: Workbench, example: str) -> None:
        """A tensor with an axis too many is an `InputError` that names it.

        On failure: `metadata.inputs` must have the ranks.
        """
        kwargs = workbench.cases(example)["sample's sizes"]
        for name, value in kwargs.items():
            with pytest.raises(InputError, match=re.escape(repr(name))):
                workbench.loaded(example)(**{**kwargs, name: value[None]})

    def test_wrong_size_is_named(self, workbench: Workbench, example: str) -> None:
        """A size that doesn't fit (a mask longer than the tokens, two channels) is an `InputError` that names the input.

        On failure: axes that belong together must have one name in `metadata.inputs`, fixed axes their size.
        """
        kwargs = workbench.cases(example)["sample's sizes"]
        name = "attention_mask" if "attention_mask" in kwargs else next(iter(kwargs))
        wrong = torch.cat([kwargs[name], kwargs[name][:, :1]], dim=1)
        with pytest.raises(InputError, match=re.escape(repr(name))):
            workbench.loaded(example)(**{**kwargs, name: wrong})

    def test_wrong_kind_is_named(self, workbench: Workbench, example: str) -> None:
        """Complex numbers for real ones, and text for numbers, are an `InputError` that names the input.

        On failure: `metadata.inputs` must have the traced dtypes.
        """
        kwargs = workbench.cases(example)["sample's sizes"]
        name = next(iter(kwargs))
        for wrong in (kwargs[name].to(torch.complex64), "text"):
            with pytest.raises(InputError, match=re.escape(repr(name))):
                workbench.loaded(example)(**{**kwargs, name: wrong})

    def test_unknown_input_warns_once(self, workbench: Workbench) -> None:
        """A kwarg that was not traced is left out, with one warning for all calls.

        On failure: don't warn in the runner; core does.
        """
        example = self.examples[0]
        kwargs = workbench.cases(example)["sample's sizes"]
        exported = workbench.load(workbench.saved(example))
        with pytest.warns(UserWarning, match="not_an_input") as caught:
            got = [exported(**kwargs, not_an_input=torch.ones(1)) for _ in range(3)]
        assert len([one for one in caught if "not_an_input" in str(one.message)]) == 1
        workbench.assert_same(workbench.expected(example, kwargs), got[-1])

    def test_results_and_inputs_keep_their_values(self, workbench: Workbench, example: str) -> None:
        """A later call changes neither an earlier result nor the inputs.

        On failure: the runner hands out a buffer that it writes to again, or writes into its inputs. Allocate, or copy.
        """
        exported, cases = workbench.loaded(example), workbench.cases(example)
        kwargs = cases["sample's sizes"]
        kept = {name: value.clone() for name, value in kwargs.items()}
        first = quietly(exported, kwargs)
        values = {name: leaf.clone() for name, leaf in structure.flatten_named(first)}
        for other in cases.values():
            quietly(exported, {n: x + 1 if x.is_floating_point() else x for n, x in other.items()})
        for name, leaf in structure.flatten_named(first):
            assert torch.equal(leaf, values[name]), f"{name} of an earlier call changed"
        for name, value in kwargs.items():
            assert torch.equal(value, kept[name]), f"the input {name} was written to"

    def test_results_have_no_gradient(self, workbench: Workbench) -> None:
        """Results are plain tensors outside any autograd graph, and can be written to.

        On failure: run under `torch.no_grad()` (not `inference_mode`, whose tensors refuse in-place changes later).
        """
        example = self.examples[0]
        got = quietly(workbench.loaded(example), workbench.cases(example)["sample's sizes"])
        for name, leaf in structure.flatten_named(got):
            assert not leaf.requires_grad, name
            assert not leaf.is_inference(), name
            leaf.add_(1)

    def test_threads(self, workbench: Workbench) -> None:
        """Two threads make 50 calls each, at sizes of their own, and each gets its own answers.

        On failure: the runner keeps state between binding inputs and reading outputs. Keep it per call or per thread, or
        hold a lock.
        """
        example = self.examples[0]
        exported, cases = workbench.load(workbench.saved(example)), list(workbench.cases(example).values())
        work = [cases[0], cases[-1]]
        expected = [workbench.expected(example, kwargs) for kwargs in work]
        ready, wrong = threading.Barrier(2), []

        def call(kwargs: _Kwargs, wanted: Any) -> None:
            try:
                ready.wait()  # so that even the first call, which makes the runner, is made twice at once
                for _ in range(50):
                    workbench.assert_same(wanted, exported(**kwargs))
            except BaseException as error:  # noqa: BLE001  raised below, where pytest sees it
                wrong.append(error)

        threads = [threading.Thread(target=call, args=pair) for pair in zip(work, expected, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if wrong:
            raise wrong[0]

    def test_device_can_be_chosen(self, workbench: Workbench) -> None:
        """`to("cpu")` and `from_pretrained(device="cpu")` run on the CPU; the default device answers the same.

        On failure: honour `request.device`, and set `device` of the runner to a torch device.
        """
        example = self.examples[0]
        kwargs = workbench.cases(example)["sample's sizes"]
        exported = workbench.load(workbench.saved(example), device="cpu")
        for device in ("cpu", None):
            got = exported.to(device)(**kwargs)
            assert exported.device.type == got[0].device.type
            workbench.assert_same(
                workbench.expected(example, kwargs), got.__class__(**{n: x.cpu() for n, x in got.items()})
            )

    def test_unavailable_device_is_refused(self, workbench: Workbench) -> None:
        """A device that isn't there is an `InputError` that names it.

        On failure: check `request.device` in `polyport_run`; `torch.device("nonsense")` raises a RuntimeError of its own.
        """
        example = self.examples[0]
        for device in ("cuda:99", "nonsense"):
            exported = workbench.load(workbench.saved(example), device=device)
            with pytest.raises(InputError, match=device):
                exported(**workbench.cases(example)["sample's sizes"])

    def test_unknown_runner_option_is_refused(self, workbench: Workbench) -> None:
        """A misspelt runner option is an `InputError` that names it.

        On failure: call `request.take(**defaults)` in `polyport_run`, with no arguments if there are no options.
        """
        example = self.examples[0]
        exported = workbench.load(workbench.saved(example), no_such_option=1)
        with pytest.raises(InputError, match="no_such_option"), warnings.catch_warnings():
            exported(**workbench.cases(example)["sample's sizes"])
