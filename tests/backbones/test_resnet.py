"""ResNet, plain and vd: published sizes, equality with torchvision's where both hold the same weights, any size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet as reference
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.ops import FrozenBatchNorm2d

from vitdet.backbones.layers import ConvNorm
from vitdet.backbones.resnet import (
    BasicBlock,
    Bottleneck,
    ResNet,
    resnet18_vd,
    resnet34_vd,
    resnet50,
    resnet50_vd,
    resnet101_vd,
)
from vitdet.errors import UserError
from vitdet.weights.resnet import convert
from vitdet.weights.rules import load_strict

COUNTERS = ("*.num_batches_tracked",)

# Variants C and D replace the 7×7 convolution of the stem (3·64·49 weights) and its norm by three 3×3 and theirs.
STEM = (3 * 32 + 32 * 32 + 32 * 64) * 9 + 2 * (32 + 32 + 64) - (3 * 64 * 49 + 2 * 64)


@pytest.mark.parametrize(
    ("build", "weights", "width", "extra"),
    [
        # The first stage of R18 and R34 projects 64 to 64 channels; torchvision's doesn't.
        (resnet18_vd, reference.ResNet18_Weights, 512, 64 * 64 + 2 * 64),
        (resnet34_vd, reference.ResNet34_Weights, 512, 64 * 64 + 2 * 64),
        (resnet50_vd, reference.ResNet50_Weights, 2048, 0),
        (resnet101_vd, reference.ResNet101_Weights, 2048, 0),
    ],
    ids=["r18", "r34", "r50", "r101"],
)
def test_as_many_parameters_as_published(build: Callable[[], ResNet], weights, width: int, extra: int) -> None:
    with torch.device("meta"):
        model = build()
    classifier = width * 1000 + 1000
    expected = weights.IMAGENET1K_V1.meta["num_params"] - classifier + STEM + extra
    assert sum(p.numel() for p in model.parameters()) == expected
    assert model.channels[-1] == width


def tiny(**options) -> ResNet:
    numbers = {"block": BasicBlock, "stem": (4, 4, 8)}
    return ResNet(depths=(1, 1, 1, 1), widths=(4, 8, 12, 16), **(numbers | options))


@pytest.mark.parametrize(("block", "expansion"), [(BasicBlock, 1), (Bottleneck, 4)])
@pytest.mark.parametrize(("stem", "out_stages"), [((4, 4, 8), (1, 2, 3)), ((4, 6), (0, 3))])
def test_maps_are_as_announced(block, expansion: int, stem: tuple[int, ...], out_stages: tuple[int, ...]) -> None:
    model = tiny(block=block, stem=stem, out_stages=out_stages)
    assert model.channels == [(4, 8, 12, 16)[stage] * expansion for stage in out_stages]
    assert model.strides == [(4, 8, 16, 32)[stage] for stage in out_stages]
    for height, width in [(64, 96), (65, 97), (33, 40)]:
        maps = model(torch.randn(2, 3, height, width))
        shapes = [tuple(one.shape) for one in maps]
        assert shapes == [
            (2, c, -(-height // s), -(-width // s)) for c, s in zip(model.channels, model.strides, strict=True)
        ]


def units(module: nn.Module) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    return [(m.conv, m.norm) for m in module.modules() if isinstance(m, ConvNorm)]


def copy_units(ours: list[tuple[nn.Module, nn.Module]], theirs: list[tuple[nn.Module, nn.Module]]) -> None:
    for (conv, norm), (their_conv, their_norm) in zip(ours, theirs, strict=True):
        nn.init.normal_(conv.weight, std=0.3)
        for value in (norm.weight, norm.bias, norm.running_mean):
            nn.init.normal_(value)
        nn.init.uniform_(norm.running_var, 0.5, 2)
        their_conv.load_state_dict(conv.state_dict())
        their_norm.load_state_dict(norm.state_dict())


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
def test_blocks_equal_torchvision(kind: str, stride: int) -> None:
    """Theirs with variant D's shortcut: the average pool before the projection."""
    ours = (BasicBlock if kind == "basic" else Bottleneck)(6, 4, stride=stride, first=True).eval()
    projection = [nn.Conv2d(6, 4 * ours.expansion, 1, bias=False), nn.BatchNorm2d(4 * ours.expansion)]
    pool = [nn.AvgPool2d(2, 2)] if stride == 2 else []
    shortcut = nn.Sequential(*pool, *projection)
    theirs = (reference.BasicBlock if kind == "basic" else reference.Bottleneck)(6, 4, stride, shortcut).eval()
    numbers = (1, 2) if kind == "basic" else (1, 2, 3)
    their_units = [(getattr(theirs, f"conv{i}"), getattr(theirs, f"bn{i}")) for i in numbers]
    copy_units(units(ours.convs), their_units)
    copy_units(units(ours.shortcut), [(projection[0], projection[1])])
    maps = torch.randn(2, 6, 8, 10)
    torch.testing.assert_close(ours(maps), theirs(maps), rtol=1e-5, atol=1e-5)


def test_later_blocks_add_their_input() -> None:
    block, maps = BasicBlock(4, 4, stride=1, first=False).eval(), torch.randn(1, 4, 5, 5)
    nn.init.zeros_(block.convs[1].norm.weight)
    assert torch.equal(block(maps), maps.relu())


@pytest.mark.parametrize("frozen_norm", [False, True])
def test_statistics_move_only_where_not_frozen(frozen_norm: bool) -> None:
    model, images = tiny(frozen_norm=frozen_norm).train(), torch.randn(2, 3, 64, 64)

    def statistics() -> Tensor:
        return torch.cat([b for name, b in model.named_buffers() if "running" in name])

    before = statistics().clone()
    outputs = model(images)
    assert torch.equal(statistics(), before) == frozen_norm
    same = all(torch.equal(a, b) for a, b in zip(outputs, model.eval()(images), strict=True))
    assert same == frozen_norm
    names = [name for name, _ in model.named_parameters()]
    assert all(name.endswith("conv.weight") for name in names) == frozen_norm


@pytest.mark.parametrize("build", [resnet50_vd, resnet101_vd])
def test_large_models_are_frozen_where_asked(build: Callable[..., ResNet]) -> None:
    """A backbone with random weights learns nothing through norms that stand still."""
    with torch.device("meta"):
        frozen, free = build(frozen_norm=True), build()
    assert not any(isinstance(m, nn.BatchNorm2d) for m in frozen.modules())
    assert len([m for m in free.modules() if isinstance(m, nn.BatchNorm2d)]) == len(units(free))


def test_convolutions_start_with_he_deviation() -> None:
    model = ResNet(depths=(1, 1, 1, 1), block=BasicBlock)
    weight = model.stages[3][0].convs[1].conv.weight  # 512 to 512, 3×3
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)
    wider = model.stages[3][0].convs[0].conv.weight  # 256 to 512: the outgoing connections count
    assert wider.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)


def lively(model: nn.Module) -> nn.Module:
    """Batch statistics and scales that matter."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith("running_var"):
                value.uniform_(1, 3)
            elif value.ndim == 1 and value.is_floating_point():
                value.add_(0.1 * torch.randn_like(value))
    return model


@pytest.mark.parametrize("dilated", [False, True], ids=["plain", "dilated"])
@pytest.mark.parametrize("size", [(64, 96), (97, 75)], ids=["even", "odd"])
def test_equal_to_torchvisions(dilated: bool, size: tuple[int, int]) -> None:
    theirs = lively(reference.resnet50(replace_stride_with_dilation=[False, False, dilated])).eval()
    ours = resnet50(dilated=dilated).eval()
    load_strict(ours, convert(theirs.state_dict()), allow_unexpected=COUNTERS)
    layers = {"layer2": "0", "layer3": "1", "layer4": "2"}
    images = torch.randn(2, 3, *size)
    with torch.inference_mode():
        expected = list(IntermediateLayerGetter(theirs, layers)(images).values())
        found = ours(images)
    assert ours.strides == [8, 16, 16 if dilated else 32]
    for one, other, channels in zip(found, expected, ours.channels, strict=True):
        assert one.shape[1] == channels
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_dilation_changes_the_last_stage_only() -> None:
    plain, dilated = resnet50().eval(), resnet50(dilated=True).eval()
    dilated.load_state_dict(plain.state_dict())
    images = torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        one, other = plain(images), dilated(images)
    assert torch.equal(one[1], other[1])
    assert other[2].shape[-2:] == one[1].shape[-2:]


def test_frozen_norms_have_no_parameters() -> None:
    frozen = resnet50(frozen_norm=True)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in frozen.modules())
    assert sum(isinstance(module, FrozenBatchNorm2d) for module in frozen.modules()) == 53
    assert sum(parameter.numel() for parameter in frozen.parameters()) == 23_454_912
    load_strict(frozen, convert(reference.resnet50().state_dict()), allow_unexpected=COUNTERS)


def test_basic_blocks_without_pools_project_where_they_must() -> None:
    network = ResNet(depths=(1, 1), block=BasicBlock, stem=(16,), widths=(16, 32), pooled=False, out_stages=(0, 1))
    assert isinstance(network.stages[0][0].shortcut, nn.Identity)
    assert [tuple(one.shape) for one in network(torch.randn(1, 3, 32, 32))] == [(1, 16, 8, 8), (1, 32, 4, 4)]


def test_a_file_of_another_network_is_refused() -> None:
    with pytest.raises(UserError, match=r"no plain ResNet's \(the first is 'cls_token'\)"):
        convert({"cls_token": torch.zeros(1, 1, 8)})
