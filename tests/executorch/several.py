"""Small models that the tests of operators share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import PreTrainedConfig, PreTrainedModel

from polyport import ExportedModel
from polyport.assembly import Pipeline
from polyport.session import Session
from polyport_executorch import ExecutorchConfig, ExecutorchExporter
from polyport_executorch.delegation import REPORT

#: With room for as many rows as any of these tests has.
DYNAMIC = ExecutorchConfig(dynamic=True, max_sizes={"batch": 8})
#: Images of one size, in any number.
ROWS = ExecutorchConfig(dynamic_shapes={"pixel_values": {0: Dim("batch", min=1, max=8)}})
SHAPES = ((1, 5), (3, 9), (2, 2), (2, 1), (1, 1))

Report = dict[str, Any]


class Several(PreTrainedModel):
    """Modules and functions that all take the same tensor: what each makes of it, by name."""

    config_class = PreTrainedConfig

    def __init__(self, **parts: Callable[[Tensor], Tensor]) -> None:
        super().__init__(PreTrainedConfig())
        self.layers = nn.ModuleDict(
            {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
        )
        self.functions = {name: part for name, part in parts.items() if name not in self.layers}
        self.post_init()
        self.eval()

    def _init_weights(self, module: nn.Module) -> None:
        """They come as they are."""

    def forward(
        self, inputs_embeds: Tensor | None = None, pixel_values: Tensor | None = None
    ) -> dict[str, Tensor]:
        x: Any = pixel_values if inputs_embeds is None else inputs_embeds
        return {name: part(x) for name, part in (*self.layers.items(), *self.functions.items())}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(*shapes: tuple[int, ...], width: int) -> list[dict[str, Any]]:
    """Inputs of some batches and lengths."""
    return [{"inputs_embeds": noise(*shape, width, seed=sum(shape))} for shape in shapes]


def images(*shapes: tuple[int, ...]) -> list[dict[str, Any]]:
    return [{"pixel_values": noise(*shape, seed=sum(shape))} for shape in shapes]


def check(
    model: Any,
    sample: dict[str, Any],
    *others: dict[str, Any],
    config: ExecutorchConfig = DYNAMIC,
    atol: float,
    rtol: float,
) -> tuple[Report, Report]:
    """Export with one sample and compare with eager at all of them.

    Returns:
        What XNNPACK computes, and what is left to ExecuTorch's own kernels: operator -> how many.
    """
    exported = ExecutorchExporter().export(model, sample, config)
    for given in (sample, *others):
        assert_same(exported, model, given, atol=atol, rtol=rtol)
    report: Any = exported["model"].metadata.backend[REPORT]
    return report["delegated"].get("XnnpackBackend", {}), report["portable"]


def assert_same(
    exported: ExportedModel, model: Any, given: dict[str, Any], *, atol: float, rtol: float
) -> None:
    with torch.no_grad():
        expected = model(**given)
    torch.testing.assert_close(dict(exported(**given)), dict(expected), atol=atol, rtol=rtol)


def kernels(left: Report, *names: str) -> list[str]:
    """The kernels that have one of some names in theirs."""
    return [kernel for kernel in left if any(name in kernel for name in names)]


def check_logits(model: Any) -> tuple[Report, Report]:
    """Export a language model with one prompt and compare with eager at others; returns what `check` does."""

    def inputs(batch: int, length: int) -> dict[str, Any]:
        ids = torch.randint(
            3, 90, (batch, length), generator=torch.Generator().manual_seed(batch * 100 + length)
        )
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}

    sample, *others = (inputs(*shape) for shape in ((1, 6), (1, 1), (3, 17), (2, 3)))
    return check(model, sample, *others, atol=1e-5, rtol=1e-5)


def lower(pipeline: Pipeline, **options: Any) -> ExportedModel:
    """A lowering of a traced model."""
    session = Session("executorch")
    made = pipeline.run([(session, ExecutorchConfig(dynamic=True, **options))])
    return ExportedModel("executorch", {"model": made["executorch"][0]}, session=session)


def assert_like_eager(model: Any, exported: ExportedModel, inputs: Any) -> None:
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
    torch.testing.assert_close(exported(**inputs).last_hidden_state, expected, atol=1e-5, rtol=1e-5)
