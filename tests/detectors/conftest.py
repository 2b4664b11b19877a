"""A small detector in which every branch matters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vitdet.detectors.rtdetr import RTDETR, rtdetr_nano


def give_values(module: nn.Module) -> nn.Module:
    """Move every parameter off its start, at which box heads, offsets' weights and biases are 0."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return module


@pytest.fixture
def small() -> Callable[..., RTDETR]:
    """Builds a fresh nano detector; the numbers that the tests count with are fixed here."""

    def build(num_classes: int = 3, **options) -> RTDETR:
        numbers = {"decoder_layers": 3, "num_queries": 100, "denoising_queries": 100, "dense_supervision": False}
        return rtdetr_nano(num_classes, **(numbers | options))

    return build


@pytest.fixture
def lively(small: Callable[..., RTDETR]) -> Callable[..., RTDETR]:
    """Builds the same with parameters and batch statistics that have values that matter."""

    def build(num_classes: int = 3, **options) -> RTDETR:
        model = small(num_classes, **options)
        give_values(model)
        norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        for norm in norms:
            norm.momentum = 1.0  # the statistics become those of the one batch
        with torch.no_grad():
            model.train()(torch.randn(2, 3, 128, 128))
        for norm in norms:
            norm.momentum = 0.1
        return model

    return build


@pytest.fixture
def train_with_fixed_norms() -> Callable[[nn.Module], None]:
    """Training mode, with the batch norms in evaluation mode: images of a batch don't know one another."""

    def switch(model: nn.Module) -> None:
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()

    return switch


@pytest.fixture
def random_boxes() -> Callable[..., Tensor]:
    """``cxcywh`` boxes inside the image."""

    def build(*shape: int) -> Tensor:
        return torch.cat([torch.rand(*shape, 2) * 0.6 + 0.2, torch.rand(*shape, 2) * 0.3 + 0.05], dim=-1)

    return build
