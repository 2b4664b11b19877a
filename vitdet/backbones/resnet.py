"""ResNet: the plain one (torchvision's), and the "vd" one that RT-DETR stands on.

ResNet-vd has a three-convolution stem, and average pooling before the shortcut of a striding block.
Sources: arXiv 1512.03385 (ResNet), arXiv 1812.01187 figure 2 (variants C and D), as used by DETR (arXiv 2005.12872)
and RT-DETR (arXiv 2304.08069).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from vitdet.backbones.layers import ConvNorm, freeze_batch_norms, stage_maps


def make_shortcut(width_in: int, width_out: int, stride: int, *, first: bool, pooled: bool) -> nn.Module:
    """Identity, or in a stage's first block a 1×1 projection.

    Where the block strides, an average pool comes first (``pooled``, variant D), or the projection strides itself.
    Pooled ones project in each stage's first block even where the widths agree, as the published R18 and R34 do.
    """
    if not first or not (pooled or stride != 1 or width_in != width_out):
        return nn.Identity()
    if stride == 1 or not pooled:
        return ConvNorm(width_in, width_out, 1, stride=stride)
    return nn.Sequential(nn.AvgPool2d(2, 2, ceil_mode=True), ConvNorm(width_in, width_out, 1))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around a shortcut; the output has ``width`` channels.

    Args:
        stride, dilation: of the first convolution, of both. first, pooled: see :func:`make_shortcut`.
    """

    expansion = 1

    def __init__(
        self, width_in: int, width: int, *, stride: int, first: bool, pooled: bool = True, dilation: int = 1
    ) -> None:
        super().__init__()
        self.shortcut = make_shortcut(width_in, width, stride, first=first, pooled=pooled)
        self.convs = nn.Sequential(
            ConvNorm(width_in, width, 3, stride=stride, dilation=dilation, activation="relu"),
            ConvNorm(width, width, 3, dilation=dilation),
        )

    def forward(self, maps: Tensor) -> Tensor:
        """(B, C_in, h, w) to (B, C, ⌈h/stride⌉, ⌈w/stride⌉)."""
        return F.relu(self.convs(maps) + self.shortcut(maps))


class Bottleneck(nn.Module):
    """1×1, 3×3 (which strides), 1×1 around a shortcut; the output has ``4 * width`` channels.

    Args:
        stride, dilation: of the 3×3 convolution. first, pooled: see :func:`make_shortcut`.
    """

    expansion = 4

    def __init__(
        self, width_in: int, width: int, *, stride: int, first: bool, pooled: bool = True, dilation: int = 1
    ) -> None:
        super().__init__()
        self.shortcut = make_shortcut(width_in, width * 4, stride, first=first, pooled=pooled)
        self.convs = nn.Sequential(
            ConvNorm(width_in, width, 1, activation="relu"),
            ConvNorm(width, width, 3, stride=stride, dilation=dilation, activation="relu"),
            ConvNorm(width, width * 4, 1),
        )

    def forward(self, maps: Tensor) -> Tensor:
        """(B, C_in, h, w) to (B, 4·width, ⌈h/stride⌉, ⌈w/stride⌉)."""
        return F.relu(self.convs(maps) + self.shortcut(maps))


def make_stem(widths: Sequence[int]) -> nn.Sequential:
    """Convolutions of these widths to a quarter of the image's size.

    One is 7×7, strides, and a max pool follows (the plain ResNet). More are 3×3, of which the first strides: after
    three (variant C) a max pool follows; with two the second strides instead: most of a small network's time goes into
    the maps of half the image's size.
    """
    if len(widths) == 1:
        return nn.Sequential(ConvNorm(3, widths[0], 7, stride=2, activation="relu"), nn.MaxPool2d(3, 2, 1))
    if len(widths) == 2:
        first = ConvNorm(3, widths[0], 3, stride=2, activation="relu")
        return nn.Sequential(first, ConvNorm(widths[0], widths[1], 3, stride=2, activation="relu"))
    convs = [ConvNorm(3, widths[0], 3, stride=2, activation="relu")]
    convs += [ConvNorm(a, b, 3, activation="relu") for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*convs, nn.MaxPool2d(3, 2, 1))


class ResNet(nn.Module):
    """ResNet giving the maps of its last stages.

    Args:
        depths: blocks in each stage; stage i has stride 4·2^i.
        block: :class:`BasicBlock` or :class:`Bottleneck`.
        stem: see :func:`make_stem`. widths: inner width of each stage's blocks.
        pooled: shortcuts as in ResNet-vd, see :func:`make_shortcut`.
        dilated: the last stage keeps the size of the one before, and its blocks after the first look twice as far
            (DETR's DC5, arXiv 2005.12872, section 4).
        out_stages: indices of the stages whose maps are given.
        frozen_norm: fixed batch-norm statistics and scales.
    """

    any_size = True  # of images

    def __init__(
        self, *, depths: Sequence[int], block: type[BasicBlock] | type[Bottleneck], stem: Sequence[int] = (32, 32, 64),
        widths: Sequence[int] = (64, 128, 256, 512), pooled: bool = True, dilated: bool = False,
        out_stages: Sequence[int] = (1, 2, 3), frozen_norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.stem = make_stem(stem)
        self.stages = nn.ModuleList()
        width_in, last = stem[-1], len(depths) - 1
        for index, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            kept = dilated and index == last
            blocks = []
            for position in range(depth):
                stride = 2 if index > 0 and position == 0 and not kept else 1
                dilation = 2 if kept and position > 0 else 1
                first = position == 0
                blocks.append(block(width_in, width, stride=stride, first=first, pooled=pooled, dilation=dilation))
                width_in = width * block.expansion
            self.stages.append(nn.Sequential(*blocks))
        self.out_stages = tuple(out_stages)
        self.channels = [widths[i] * block.expansion for i in self.out_stages]
        self.strides = [4 * 2 ** (i - 1 if dilated and i == last else i) for i in self.out_stages]
        self.reset_parameters()
        if frozen_norm:
            freeze_batch_norms(self)

    def reset_parameters(self) -> None:
        """He initialisation (arXiv 1502.01852) of the convolutions; batch norms start as the identity."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, h, w) to one (B, C_s, ⌈h/stride_s⌉, ⌈w/stride_s⌉) map per stage given."""
        return stage_maps(self.stages, self.stem(images), self.out_stages)


def resnet18_vd() -> ResNet:
    """18 layers (arXiv 1512.03385, table 1)."""
    return ResNet(depths=(2, 2, 2, 2), block=BasicBlock)


def resnet34_vd() -> ResNet:
    """34 layers (arXiv 1512.03385, table 1)."""
    return ResNet(depths=(3, 4, 6, 3), block=BasicBlock)


def resnet50_vd(*, frozen_norm: bool = False) -> ResNet:
    """50 layers (arXiv 1512.03385, table 1)."""
    return ResNet(depths=(3, 4, 6, 3), block=Bottleneck, frozen_norm=frozen_norm)


def resnet101_vd(*, frozen_norm: bool = False) -> ResNet:
    """101 layers (arXiv 1512.03385, table 1)."""
    return ResNet(depths=(3, 4, 23, 3), block=Bottleneck, frozen_norm=frozen_norm)


def resnet50(*, dilated: bool = False, out_stages: Sequence[int] = (1, 2, 3), frozen_norm: bool = False) -> ResNet:
    """The plain ResNet of 50 layers (arXiv 1512.03385, table 1), torchvision's; arguments of :class:`ResNet`."""
    return ResNet(
        depths=(3, 4, 6, 3), block=Bottleneck, stem=(64,), pooled=False, dilated=dilated, out_stages=out_stages,
        frozen_norm=frozen_norm,
    )  # fmt: skip


def resnet101(*, dilated: bool = False, out_stages: Sequence[int] = (1, 2, 3), frozen_norm: bool = False) -> ResNet:
    """The same of 101 layers."""
    return ResNet(
        depths=(3, 4, 23, 3), block=Bottleneck, stem=(64,), pooled=False, dilated=dilated, out_stages=out_stages,
        frozen_norm=frozen_norm,
    )  # fmt: skip
