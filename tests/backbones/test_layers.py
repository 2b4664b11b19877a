"""Convolution, norm, activation; and batch norms that no longer move."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitdet.backbones.layers import ConvNorm, freeze_batch_norms


@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (3, 1), (3, 2)])
def test_sizes_are_kept_over_the_stride(kernel: int, stride: int) -> None:
    module = ConvNorm(3, 4, kernel, stride=stride)
    for height, width in [(8, 6), (7, 5)]:
        found = module(torch.randn(2, 3, height, width))
        assert found.shape == (2, 4, -(-height // stride), -(-width // stride))


def test_order_of_the_three() -> None:
    module, maps = ConvNorm(4, 4, 3, groups=2, activation="silu").eval(), torch.randn(2, 4, 5, 6)
    norm = module.norm
    for statistic in (norm.running_mean, norm.weight, norm.bias):
        nn.init.normal_(statistic)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    inner = F.conv2d(maps, module.conv.weight, padding=1, groups=2)
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    inner = (inner - norm.running_mean.view(-1, 1, 1)) * scale.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)
    torch.testing.assert_close(module(maps), inner * inner.sigmoid(), rtol=1e-5, atol=1e-5)
    assert module.conv.bias is None


def test_frozen_norms_keep_their_values_and_never_move() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.BatchNorm2d(4, eps=0.1), nn.ReLU()), nn.BatchNorm2d(4))
    for name, value in module.state_dict().items():
        if "running" in name or name.startswith(("1", "2")):
            value.copy_(torch.rand(value.shape) + 0.5 if value.ndim else 3)
    images = torch.randn(2, 3, 5, 6)
    expected = module.eval()(images)
    freeze_batch_norms(module)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in module.modules())
    assert [name for name, _ in module.named_parameters()] == ["0.weight", "0.bias"]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.testing.assert_close(module.train()(images * 7 + 1), module.eval()(images * 7 + 1), rtol=0, atol=0)
    torch.testing.assert_close(module(images), expected, rtol=1e-5, atol=1e-5)
    assert {"1.0.running_mean", "2.weight"} <= set(before)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
