"""HGNetV2: the published sizes, transformers' with the same weights, any image size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from tests.parity.random_detectors import random_images, with_random_values
from vitdet.backbones import hgnetv2
from vitdet.backbones.hgnetv2 import HGNetV2, hgnetv2_atto, hgnetv2_b0
from vitdet.weights.hgnetv2 import HUGGINGFACE_RULES
from vitdet.weights.rules import convert_state_dict, load_strict

Build = Callable[..., HGNetV2]
ALL = [f"hgnetv2_b{index}" for index in range(7)]


@pytest.mark.parametrize("name", ALL)
def test_as_many_parameters_as_timm(name: str) -> None:
    with torch.device("meta"):
        ours, theirs = getattr(hgnetv2, name)(), timm.create_model(name)
    expected = sum(p.numel() for n, p in theirs.named_parameters() if n.startswith(("stem.", "stages.")))
    assert sum(p.numel() for p in ours.parameters()) == expected


@pytest.mark.parametrize("name", [*ALL, "hgnetv2_atto", "hgnetv2_femto", "hgnetv2_pico"])
def test_channels_and_strides_are_what_comes_out(name: str) -> None:
    with torch.device("meta"):
        model: HGNetV2 = getattr(hgnetv2, name)()
        maps = model(torch.empty(2, 3, 64, 96))
    assert [one.shape for one in maps] == [
        (2, channels, 64 // stride, 96 // stride)
        for channels, stride in zip(model.channels, model.strides, strict=True)
    ]


def reference_b0(*, affine: bool) -> nn.Module:
    """Their backbone with the numbers of B0, giving the last three stages."""
    transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")
    config = transformers.HGNetV2Config(
        stem_channels=[3, 16, 16], hidden_sizes=[64, 256, 512, 1024], depths=[1, 1, 2, 1], out_indices=[2, 3, 4],
        stage_in_channels=[16, 64, 256, 512], stage_mid_channels=[16, 32, 64, 128],
        stage_out_channels=[64, 256, 512, 1024], stage_num_blocks=[1, 1, 2, 1], stage_numb_of_layers=[3, 3, 3, 3],
        use_learnable_affine_block=affine,
    )  # fmt: skip
    return with_random_values(transformers.HGNetV2Backbone(config)).eval()


@pytest.mark.parametrize("affine", [True, False])
def test_same_maps_as_transformers(affine: bool) -> None:
    theirs, ours = reference_b0(affine=affine), hgnetv2_b0(affine=affine).eval()
    named = {f"backbone.{name}": tensor for name, tensor in theirs.state_dict().items()}
    state = convert_state_dict(named, [(r"\.num_batches_tracked$", None), *HUGGINGFACE_RULES])
    load_strict(
        ours,
        {name.removeprefix("backbone."): tensor for name, tensor in state.items()},
        allow_missing=("*.num_batches_tracked",),
    )
    images = random_images(2, 64, 96)
    with torch.inference_mode():
        expected, found = theirs(images).feature_maps, ours(images)
    assert len(expected) == len(found) == 3
    for one, other in zip(found, expected, strict=True):
        assert other.std() > 1e-2
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_stages_can_be_chosen() -> None:
    model = hgnetv2_b0(out_stages=(0, 3))
    assert (model.channels, model.strides) == ([64, 1024], [4, 32])
    assert [one.shape[1:] for one in model(torch.rand(1, 3, 32, 64))] == [(64, 8, 16), (1024, 1, 2)]
    with pytest.raises(ValueError, match=r"out_stages are indices of the 3 stages, got \[3\]"):
        hgnetv2_atto(out_stages=(3,))


def test_affine_factors_change_the_output() -> None:
    model = hgnetv2_atto().eval()
    images = torch.rand(1, 3, 64, 64)
    before = model(images)[0]
    with torch.no_grad():
        model.stages[0].blocks[0].layers[1].affine.scale.mul_(2)
    assert not torch.allclose(before, model(images)[0])


def test_norms_can_be_fixed() -> None:
    norms = [m for m in hgnetv2_b0(frozen_norm=True).modules() if "BatchNorm" in type(m).__name__]
    assert norms
    assert all(isinstance(norm, FrozenBatchNorm2d) for norm in norms)


@pytest.mark.parametrize("build", [hgnetv2_b0, hgnetv2_atto])
def test_every_parameter_learns(build: Build) -> None:
    model = build()
    sum(one.square().mean() for one in model(torch.rand(2, 3, 64, 64))).backward()
    # A shift before 1×1 convolutions alone changes nothing: the batch norms after them take it away.
    dead = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert [name for name in dead if not name.endswith("affine.bias")] == []
