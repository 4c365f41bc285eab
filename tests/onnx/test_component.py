"""Names of a graph whose leaves go in and come out again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertPreTrainedModel

from polyport import ExportedModel, OnnxConfig, OnnxExporter
from polyport.metadata import ExportMetadata, TensorInfo
from polyport_onnx.component import graph_names


class Echo(BertPreTrainedModel):
    """Returns its mask beside what it computes, as audio language models do."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any
    ) -> dict[str, Any]:
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        hidden = self.embed(input_ids) * attention_mask[..., None]
        return {"hidden": hidden, "attention_mask": attention_mask}


def test_leaf_on_both_sides_has_two_names() -> None:
    ids, mask, logits = (TensorInfo(name, "int64", (1,)) for name in ("ids", "mask", "logits"))
    metadata = ExportMetadata(inputs=(ids, mask), outputs=(mask, logits))
    assert graph_names(metadata) == (["ids", "input.mask"], ["output.mask", "logits"])


def test_mask_that_comes_back_survives_saving(tmp_path: Path) -> None:
    model = Echo(BertConfig(vocab_size=16, hidden_size=8, num_attention_heads=2)).eval()
    ids = torch.tensor([[3, 4, 5]])
    OnnxExporter().export(model, {"input_ids": ids}, OnnxConfig(dynamic=True)).save_pretrained(
        tmp_path / "echo"
    )
    loaded = ExportedModel.from_pretrained(tmp_path / "echo")
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    ids = torch.arange(8).reshape(2, 4)
    found = loaded(input_ids=ids, attention_mask=mask)
    with torch.no_grad():
        wanted = model(ids, mask)
    assert found["attention_mask"].equal(mask)
    torch.testing.assert_close(found["hidden"], wanted["hidden"], atol=1e-6, rtol=1e-6)
