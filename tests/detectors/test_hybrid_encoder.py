"""The hybrid encoder: sizes, its parts by hand, and which map reaches which."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitdet.backbones.layers import ConvNorm
from vitdet.core.positions import sinusoidal_2d
from vitdet.detectors.hybrid_encoder import FusionBlock, HybridEncoder, RepVggBlock


def with_statistics(module: nn.Module) -> nn.Module:
    """In evaluation mode, with batch norms that are no identity."""
    for one in module.modules():
        if isinstance(one, nn.BatchNorm2d):
            nn.init.uniform_(one.weight, 0.5, 1.5)
            nn.init.normal_(one.bias)
            nn.init.normal_(one.running_mean)
            nn.init.uniform_(one.running_var, 0.5, 2)
    return module.eval()


def small_encoder(**options) -> HybridEncoder:
    numbers = {"width": 16, "heads": 4, "hidden": 24, "blocks": 1}
    return HybridEncoder([4, 6, 8], **(numbers | options))


def folded(unit: ConvNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """The convolution and norm as one convolution with a bias."""
    scale = unit.norm.weight / (unit.norm.running_var + unit.norm.eps).sqrt()
    return unit.conv.weight * scale.view(-1, 1, 1, 1), unit.norm.bias - unit.norm.running_mean * scale


def test_two_convolutions_can_be_merged() -> None:
    """What RepVGG is for: 3×3 and 1×1 side by side are one 3×3 (arXiv 2101.03697, section 3.3)."""
    block, maps = with_statistics(RepVggBlock(4, activation="silu")), torch.randn(2, 4, 5, 6)
    (weight3, bias3), (weight1, bias1) = folded(block.conv3), folded(block.conv1)
    merged = F.conv2d(maps, weight3 + F.pad(weight1, [1, 1, 1, 1]), bias3 + bias1, padding=1)
    torch.testing.assert_close(block(maps), F.silu(merged), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hidden", [8, 4])
def test_fusion_by_hand(hidden: int) -> None:
    block = with_statistics(FusionBlock(12, 8, hidden=hidden, blocks=2, activation="relu"))
    maps = torch.randn(2, 12, 5, 6)
    inner = block.enter(maps)
    for one in block.blocks:
        inner = one(inner)
    expected = inner + block.shortcut(maps)
    assert len(block.blocks) == 2
    assert isinstance(block.leave, ConvNorm) == (hidden != 8)
    if hidden != 8:
        expected = F.relu(block.leave.norm(block.leave.conv(expected)))
    assert expected.shape == (2, 8, 5, 6)
    torch.testing.assert_close(block(maps), expected)


@pytest.mark.parametrize(("height", "width"), [(8, 8), (4, 12)])
def test_maps_keep_their_sizes_and_share_one_width(height: int, width: int) -> None:
    encoder = small_encoder()
    maps = [torch.randn(2, c, height * s, width * s) for c, s in [(4, 4), (6, 2), (8, 1)]]
    shapes = [tuple(one.shape) for one in encoder(maps)]
    assert shapes == [(2, 16, height * s, width * s) for s in (4, 2, 1)]
    assert encoder.channels == [16, 16, 16]


def test_every_map_reaches_every_other() -> None:
    encoder = with_statistics(small_encoder())
    maps = [torch.randn(1, c, 4 * s, 6 * s, requires_grad=True) for c, s in [(4, 4), (6, 2), (8, 1)]]
    for fused in encoder(maps):
        for gradient in torch.autograd.grad(fused.square().sum(), maps, retain_graph=True):
            assert gradient.abs().max() > 1e-6


def test_attention_within_the_coarsest_map_by_hand() -> None:
    encoder, maps = small_encoder(layers=2), torch.randn(2, 16, 3, 5)
    tokens = torch.stack([maps[:, :, y, x] for y in range(3) for x in range(5)], dim=1)  # row by row
    pos = sinusoidal_2d(3, 5, 16)[None]
    for block in encoder.attend:
        tokens = block(tokens, query_pos=pos)
    found = encoder.attend_within(maps)
    assert len(encoder.attend) == 2
    for y in range(3):
        for x in range(5):
            torch.testing.assert_close(found[:, :, y, x], tokens[:, y * 5 + x])


def test_fusion_goes_down_then_up() -> None:
    """The finest output is made before the way up, the coarsest after it (arXiv 2304.08069, figure 4)."""
    encoder = with_statistics(small_encoder())
    maps = [torch.randn(1, c, 4 * s, 4 * s) for c, s in [(4, 4), (6, 2), (8, 1)]]
    fine, middle, coarse = (project(one) for project, one in zip(encoder.project, maps, strict=True))
    top = encoder.lateral[0](encoder.attend_within(coarse))
    mid = encoder.top_down[0](torch.cat([top.repeat_interleave(2, -1).repeat_interleave(2, -2), middle], 1))
    mid = encoder.lateral[1](mid)
    first = encoder.top_down[1](torch.cat([mid.repeat_interleave(2, -1).repeat_interleave(2, -2), fine], 1))
    second = encoder.bottom_up[0](torch.cat([encoder.downsample[0](first), mid], 1))
    third = encoder.bottom_up[1](torch.cat([encoder.downsample[1](second), top], 1))
    for found, expected in zip(encoder(maps), (first, second, third), strict=True):
        torch.testing.assert_close(found, expected)
