"""The model can be captured as a graph at any size, and the graph gives what the model gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vitdet.detectors.rtdetr import rtdetr_nano


class Raw(nn.Module):
    """The detector with plain tensors as its outputs, as an exported graph has them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        output = self.model(images)
        return output.logits, output.boxes


@pytest.mark.parametrize("size", [(64, 64), (96, 160)], ids=["square", "wide"])
def test_the_exported_graph_equals_the_model(size: tuple[int, int]) -> None:
    model = Raw(rtdetr_nano(3)).eval()
    images = torch.rand(1, 3, *size)
    program = torch.export.export(model, (images,))
    other = torch.rand(1, 3, *size)
    with torch.no_grad():
        for mine, exported in zip(model(other), program.module()(other), strict=True):
            torch.testing.assert_close(exported, mine, rtol=1e-5, atol=1e-5)
