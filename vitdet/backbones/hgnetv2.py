"""PP-HGNetV2: stages that concatenate every layer's output and squeeze it (github.com/PaddlePaddle/PaddleClas).

Under RT-DETR (arXiv 2304.08069), D-FINE (arXiv 2410.13842) and DEIMv2 (arXiv 2509.20787), whose narrow variants have
three stages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdet.backbones.layers import ConvNorm, freeze_batch_norms, stage_maps


class Stem(nn.Module):
    """To a quarter of the image's size: a pooled and a convolved branch, concatenated.

    Args:
        inner, width: channels within and after it. affine: see :class:`HGNetV2`.
    """

    def __init__(self, inner: int, width: int, *, affine: bool) -> None:
        super().__init__()
        self.enter = ConvNorm(3, inner, 3, stride=2, activation="relu", affine=affine)
        self.narrow = ConvNorm(inner, inner // 2, 2, activation="relu", affine=affine)
        self.widen = ConvNorm(inner // 2, inner, 2, activation="relu", affine=affine)
        self.pool = nn.MaxPool2d(2, stride=1)
        self.merge = ConvNorm(2 * inner, inner, 3, stride=2, activation="relu", affine=affine)
        self.leave = ConvNorm(inner, width, 1, activation="relu", affine=affine)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, h, w) to (B, C, h/4, w/4)."""
        maps = F.pad(self.enter(images), (0, 1, 0, 1))  # (B, inner, h/2 + 1, w/2 + 1): kernels of 2 keep the size so
        convolved = self.widen(F.pad(self.narrow(maps), (0, 1, 0, 1)))
        return self.leave(self.merge(torch.cat([self.pool(maps), convolved], dim=1)))


def make_layer(width_in: int, width: int, kernel: int, *, light: bool, affine: bool) -> nn.Module:
    """A convolution; or, light, a 1×1 one that mixes the channels and then one for each channel."""
    if not light:
        return ConvNorm(width_in, width, kernel, activation="relu", affine=affine)
    return nn.Sequential(
        ConvNorm(width_in, width, 1),
        ConvNorm(width, width, kernel, groups=width, activation="relu", affine=affine),
    )


class AggregationBlock(nn.Module):
    """Layers one after another; the input and what each of them gives are concatenated and squeezed.

    Args:
        width_in, inner, width: channels of the input, of every layer and of the output.
        layers: how many. kernel, light, affine: see :func:`make_layer`.
        residual: whether the input is added to the output.
    """

    def __init__(
        self, width_in: int, inner: int, width: int, *, layers: int, kernel: int, light: bool, affine: bool,
        residual: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.residual = residual
        self.layers = nn.ModuleList(
            make_layer(inner if index else width_in, inner, kernel, light=light, affine=affine)
            for index in range(layers)
        )
        self.aggregate = nn.Sequential(
            ConvNorm(width_in + layers * inner, width // 2, 1, activation="relu", affine=affine),
            ConvNorm(width // 2, width, 1, activation="relu", affine=affine),
        )

    def forward(self, maps: Tensor) -> Tensor:
        """(B, C_in, h, w) to (B, C, h, w)."""
        found = [maps]
        for layer in self.layers:
            found.append(layer(found[-1]))
        squeezed = self.aggregate(torch.cat(found, dim=1))
        return squeezed + maps if self.residual else squeezed


class Stage(nn.Module):
    """A depthwise convolution that halves the maps (not in the first stage), then blocks.

    Args:
        width_in, inner, width: channels, see :class:`AggregationBlock`. depth: number of blocks.
        downsample: whether the maps are halved. options: of every block.
    """

    def __init__(self, width_in: int, inner: int, width: int, *, depth: int, downsample: bool, **options) -> None:
        super().__init__()
        self.downsample = ConvNorm(width_in, width_in, 3, stride=2, groups=width_in) if downsample else nn.Identity()
        self.blocks = nn.Sequential(
            *[
                AggregationBlock(width if index else width_in, inner, width, residual=index > 0, **options)
                for index in range(depth)
            ]
        )

    def forward(self, maps: Tensor) -> Tensor:
        """(B, C_in, h, w) to (B, C, h/2, w/2), or (B, C, h, w)."""
        return self.blocks(self.downsample(maps))


class HGNetV2(nn.Module):
    """PP-HGNetV2 giving the maps of some of its stages.

    Args:
        stem: channels within and after the stem.
        inner, widths: channels of each stage's layers, and of its output. Stage i has stride 4·2^i.
        depths: blocks in each stage. layers: in each block. kernels: of each stage's layers.
        affine: whether a learnt factor and a learnt shift of all values follow every activation.
        out_stages: indices of the stages whose maps are given.
        frozen_norm: fixed batch-norm statistics and scales.

    The layers of the third and fourth stage are light, see :func:`make_layer`.
    """

    any_size = True  # of images

    def __init__(
        self, *, stem: Sequence[int], inner: Sequence[int], widths: Sequence[int], depths: Sequence[int], layers: int,
        kernels: Sequence[int] = (3, 3, 5, 5), affine: bool = False, out_stages: Sequence[int] = (1, 2, 3),
        frozen_norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if not all(0 <= index < len(widths) for index in out_stages):
            raise ValueError(f"out_stages are indices of the {len(widths)} stages, got {list(out_stages)}")
        self.stem = Stem(*stem, affine=affine)
        self.stages = nn.ModuleList()
        width_in = stem[1]
        for index, (mid, width, depth, kernel) in enumerate(zip(inner, widths, depths, kernels, strict=True)):
            options = {"layers": layers, "kernel": kernel, "light": index >= 2, "affine": affine}
            self.stages.append(Stage(width_in, mid, width, depth=depth, downsample=index > 0, **options))
            width_in = width
        self.out_stages = tuple(out_stages)
        self.channels = [widths[index] for index in self.out_stages]
        self.strides = [4 * 2**index for index in self.out_stages]
        self.reset_parameters()
        if frozen_norm:
            freeze_batch_norms(self)

    def reset_parameters(self) -> None:
        """He initialisation (arXiv 1502.01852) of the convolutions; norms and affine factors start as the identity."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, h, w) to one (B, C_s, h/stride_s, w/stride_s) map per stage given; h and w divisible by 32."""
        return stage_maps(self.stages, self.stem(images), self.out_stages)


def hgnetv2_b0(*, affine: bool = True, **options) -> HGNetV2:
    """Under D-FINE-N, D-FINE-S and DEIMv2-N. B0 to B3 were published with ``affine``, the others without."""
    return HGNetV2(
        stem=(16, 16), inner=(16, 32, 64, 128), widths=(64, 256, 512, 1024), depths=(1, 1, 2, 1), layers=3,
        affine=affine, **options,
    )  # fmt: skip


def hgnetv2_b1(*, affine: bool = True, **options) -> HGNetV2:
    """As B0 with wider layers."""
    return HGNetV2(
        stem=(24, 32), inner=(32, 48, 96, 192), widths=(64, 256, 512, 1024), depths=(1, 1, 2, 1), layers=3,
        affine=affine, **options,
    )  # fmt: skip


def hgnetv2_b2(*, affine: bool = True, **options) -> HGNetV2:
    """Under D-FINE-M."""
    return HGNetV2(
        stem=(24, 32), inner=(32, 64, 128, 256), widths=(96, 384, 768, 1536), depths=(1, 1, 3, 1), layers=4,
        affine=affine, **options,
    )  # fmt: skip


def hgnetv2_b3(*, affine: bool = True, **options) -> HGNetV2:
    """Five layers a block."""
    return HGNetV2(
        stem=(24, 32), inner=(32, 64, 128, 256), widths=(128, 512, 1024, 2048), depths=(1, 1, 3, 1), layers=5,
        affine=affine, **options,
    )  # fmt: skip


def hgnetv2_b4(*, affine: bool = False, **options) -> HGNetV2:
    """Under RT-DETR's HGNetv2-L and D-FINE-L."""
    return HGNetV2(
        stem=(32, 48), inner=(48, 96, 192, 384), widths=(128, 512, 1024, 2048), depths=(1, 1, 3, 1), layers=6,
        affine=affine, **options,
    )  # fmt: skip


def hgnetv2_b5(*, affine: bool = False, **options) -> HGNetV2:
    """Under RT-DETR's HGNetv2-X and D-FINE-X."""
    return HGNetV2(
        stem=(32, 64), inner=(64, 128, 256, 512), widths=(128, 512, 1024, 2048), depths=(1, 2, 5, 2), layers=6,
        affine=affine, **options,
    )  # fmt: skip


def hgnetv2_b6(*, affine: bool = False, **options) -> HGNetV2:
    """Under RT-DETRv2's HGNetv2-H."""
    return HGNetV2(
        stem=(48, 96), inner=(96, 192, 384, 768), widths=(192, 512, 1024, 2048), depths=(2, 3, 6, 3), layers=6,
        affine=affine, **options,
    )  # fmt: skip


def hgnetv2_atto(*, affine: bool = True, out_stages: Sequence[int] = (2,), **options) -> HGNetV2:
    """DEIMv2's smallest: B0 without its last stage, one block a stage, kernels of 3."""
    return HGNetV2(
        stem=(16, 16), inner=(16, 32, 64), widths=(64, 256, 256), depths=(1, 1, 1), layers=3, kernels=(3, 3, 3),
        affine=affine, out_stages=out_stages, **options,
    )  # fmt: skip


def hgnetv2_femto(*, affine: bool = True, out_stages: Sequence[int] = (2,), **options) -> HGNetV2:
    """DEIMv2's: B0 without its last stage, one block a stage."""
    return HGNetV2(
        stem=(16, 16), inner=(16, 32, 64), widths=(64, 256, 512), depths=(1, 1, 1), layers=3, kernels=(3, 3, 5),
        affine=affine, out_stages=out_stages, **options,
    )  # fmt: skip


def hgnetv2_pico(*, affine: bool = True, out_stages: Sequence[int] = (2,), **options) -> HGNetV2:
    """DEIMv2's: B0 without its last stage."""
    return HGNetV2(
        stem=(16, 16), inner=(16, 32, 64), widths=(64, 256, 512), depths=(1, 1, 2), layers=3, kernels=(3, 3, 5),
        affine=affine, out_stages=out_stages, **options,
    )  # fmt: skip
