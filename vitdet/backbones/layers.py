"""Convolution, batch normalisation, activation: what convolutional backbones and the hybrid encoder are made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU, "gelu": nn.GELU, "none": nn.Identity}


class LearnableAffine(nn.Module):
    """One learnt factor and one learnt shift for all values (HGNetV2's LAB); starts as the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, maps: Tensor) -> Tensor:
        """(B, C, h, w) to the same."""
        return (maps * self.scale + self.bias).to(maps.dtype)  # which float32 parameters would change


class ConvNorm(nn.Module):
    """Bias-free convolution padded to keep the size (over the stride), batch norm, activation.

    A :class:`LearnableAffine` follows where ``affine``.
    """

    def __init__(
        self, width_in: int, width_out: int, kernel: int, *, stride: int = 1, groups: int = 1, dilation: int = 1,
        activation: str = "none", affine: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.conv = nn.Conv2d(
            width_in, width_out, kernel, stride, dilation * (kernel - 1) // 2, dilation, groups, bias=False
        )
        self.norm = nn.BatchNorm2d(width_out)
        self.activation = ACTIVATIONS[activation]()
        self.affine = LearnableAffine() if affine else nn.Identity()

    def forward(self, maps: Tensor) -> Tensor:
        """(B, C_in, h, w) to (B, C_out, ⌈h/stride⌉, ⌈w/stride⌉)."""
        return self.affine(self.activation(self.norm(self.conv(maps))))


def stage_maps(stages: nn.ModuleList, maps: Tensor, wanted: Sequence[int]) -> list[Tensor]:
    """What comes out of the wanted ones of stages that run one after the other, in their order."""
    outputs = []
    for index, stage in enumerate(stages):
        maps = stage(maps)
        if index in wanted:
            outputs.append(maps)
    return outputs


def level_projections(channels: Sequence[int], width: int, *, always: bool) -> nn.ModuleList:
    """A 1×1 convolution to ``width`` for each map; where not ``always``, none for maps that are as wide already."""
    return nn.ModuleList(ConvNorm(c, width, 1) if always or c != width else nn.Identity() for c in channels)


def dense_gradient(maps: Tensor) -> Tensor:
    """The same maps; in the backward pass their gradient is laid out anew, without gaps.

    The gradient of a concatenation's part is a view with gaps, on which the CPU's batch-norm backward takes 36 ms
    instead of 2 for 8×128×32×40 values.
    """
    if maps.requires_grad and maps.device.type == "cpu":
        maps.register_hook(lambda gradient: gradient.contiguous(memory_format=torch.channels_last))
    return maps


def freeze_batch_norms(module: nn.Module) -> None:
    """Replace every batch norm below ``module`` by one with fixed statistics and scale, keeping their values.

    Detectors fine-tuned with few images a device do so (DETR, arXiv 2005.12872, section 4; RT-DETR R50 and R101).
    """
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            frozen = FrozenBatchNorm2d(child.num_features, eps=child.eps)
            state = child.state_dict()
            state.pop("num_batches_tracked", None)
            frozen.load_state_dict(state)
            setattr(module, name, frozen)
        else:
            freeze_batch_norms(child)
