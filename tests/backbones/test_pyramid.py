from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vitdet.backbones.pyramid import ChannelNorm, Pyramid
from vitdet.backbones.swin import Swin
from vitdet.backbones.vit import ViT
from vitdet.core.positions import resample_positions


def plain_vit(image_size: tuple[int, int] = (64, 64)) -> ViT:
    return ViT(width=32, layers=2, heads=2, hidden=64, patch=16, image_size=image_size)


class OneMap(nn.Module):
    """The least that a pyramid can stand on."""

    def __init__(self, stride: int, channels: int = 8) -> None:
        super().__init__()
        self.channels, self.strides = [channels], [stride]
        self.cut = nn.Conv2d(3, channels, stride, stride)

    def forward(self, images: Tensor) -> list[Tensor]:
        return [self.cut(images)]


def test_levels_of_a_plain_vit() -> None:
    pyramid = Pyramid(plain_vit(), width=24, scales=(4, 2, 1, 0.5))
    assert pyramid.strides == [4, 8, 16, 32]
    assert pyramid.channels == [24] * 4
    maps = pyramid(torch.randn(2, 3, 64, 96))
    assert [tuple(level.shape) for level in maps] == [(2, 24, 64 // s, 96 // s) for s in pyramid.strides]


def test_default_strides_are_those_detectors_take() -> None:
    assert Pyramid(plain_vit(), width=24).strides == [8, 16, 32]


def test_every_parameter_is_used_and_levels_have_their_own() -> None:
    pyramid = Pyramid(OneMap(16), width=12, scales=(4, 2, 1, 0.5))
    sum(level.square().sum() for level in pyramid(torch.randn(1, 3, 64, 64))).backward()
    assert all(parameter.grad is not None for parameter in pyramid.parameters())


def test_a_level_sees_the_place_it_stands_for() -> None:
    pyramid = Pyramid(OneMap(16), width=12, scales=(4,))
    images = torch.randn(1, 3, 160, 160, requires_grad=True)
    (level,) = pyramid(images)
    (gradient,) = torch.autograd.grad(level[0, :, 21, 2].sum(), images)
    rows, columns = (gradient[0].abs().sum((0, axis)).nonzero()[:, 0] for axis in (2, 1))
    # Place (21, 2) at stride 4 and its 3×3 neighbours lie in patches (5, 0), which are 16 pixels wide.
    assert (rows.min(), rows.max()) == (5 * 16, 6 * 16 - 1)
    assert (columns.min(), columns.max()) == (0, 15)


def test_levels_are_normed_over_channels() -> None:
    maps = Pyramid(OneMap(16), width=12)(torch.randn(1, 3, 64, 64))
    for level in maps:
        torch.testing.assert_close(level.mean(1), torch.zeros_like(level[:, 0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        ChannelNorm(8)(x := torch.randn(2, 8, 3, 3))[1, :, 2, 0],
        nn.functional.layer_norm(x[1, :, 2, 0], (8,), eps=1e-6),
    )


def test_the_rest_of_the_contract_is_the_backbones() -> None:
    pyramid = Pyramid(backbone := plain_vit(), width=24)
    images = torch.randn(1, 3, 64, 64)
    pyramid.eval()
    assert torch.equal(pyramid.tokens(images), backbone.tokens(images))
    assert pyramid.prefix_tokens == backbone.prefix_tokens
    assert pyramid.depth == backbone.depth
    for name, _ in pyramid.named_parameters():
        inner = name.removeprefix("backbone.")
        assert pyramid.depth_of(name) == (backbone.depth if inner == name else backbone.depth_of(inner))


def test_positions_are_adapted_below_the_pyramid() -> None:
    small, large = Pyramid(plain_vit((32, 32)), width=24), Pyramid(plain_vit((64, 96)), width=24)
    large.load_state_dict(large.adapt(small.state_dict()))
    before, after = (one.backbone.positions.table for one in (small, large))  # (1, h, w, C)
    torch.testing.assert_close(after.flatten(1, 2), resample_positions(before.flatten(1, 2), (2, 2), (4, 6)))
    torch.testing.assert_close(large.levels[1][0].weight, small.levels[1][0].weight)


@pytest.mark.parametrize(
    ("backbone", "scales", "message"),
    [
        (OneMap(16), (3,), "4, 2, 1 or 0.5 times as large as the backbone's, got 3"),
        (OneMap(14), (4,), "a map 4 times as large as one of stride 14 has no stride"),
        (Swin(width=8, depths=(1, 1), heads=(1, 1), out_stages=(0, 1)), (1,), r"gives 1 map, this one gives \[8, 16\]"),
    ],
)
def test_refused(backbone: nn.Module, scales: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pyramid(backbone, scales=scales)
