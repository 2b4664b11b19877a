"""DEIMv2's spatial tuning adapter: a plain ViT's maps joined with the details of a few convolutions.

Source: arXiv 2509.20787, section 3.2. The ViT sees the image in patches of 16; what is smaller than a patch comes from
the convolutions, which halve the image step by step.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdet.backbones.layers import ConvNorm


class Details(nn.Module):
    """Convolutions to an 8th, a 16th and a 32nd of the image's size, with 2, 4 and 4 times ``inner`` channels."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.stem = ConvNorm(3, inner, 3, stride=2, activation="gelu")
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.convs = nn.ModuleList(ConvNorm(a * inner, b * inner, 3, stride=2) for a, b in ((1, 2), (2, 4), (4, 4)))

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, h, w) to three maps, the finest first; none of them has been through an activation."""
        first, *others = self.convs
        found = [first(self.pool(self.stem(images)))]
        for conv in others:
            found.append(conv(F.gelu(found[-1])))
        return found


class SpatialAdapter(nn.Module):
    """Maps of stride 8, 16 and 32 from three layers of a ViT whose patches are 16 wide.

    Args:
        vit: its ``forward`` gives three maps of stride 16; the first is to become the finest.
        width: C, of all maps given. inner: channels of the first convolution, see :class:`Details`.
    """

    def __init__(self, vit: nn.Module, *, width: int, inner: int = 16) -> None:
        super().__init__()
        self.vit = cast("Any", vit)
        if self.vit.strides != [16, 16, 16]:
            raise ValueError(f"a spatial adapter needs three maps of stride 16, this ViT gives {self.vit.strides}")
        self.details = Details(inner)
        self.fuse = nn.ModuleList(
            ConvNorm(channels + count * inner, width, 1)
            for channels, count in zip(self.vit.channels, (2, 4, 4), strict=True)
        )
        self.channels, self.strides = [width] * 3, [8, 16, 32]

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, h, w) to one (B, C, h/stride_s, w/stride_s) map per level; h and w divisible by 32."""
        outputs = []
        for maps, details, fuse in zip(self.vit(images), self.details(images), self.fuse, strict=True):
            meaning = F.interpolate(maps, size=details.shape[-2:], mode="bilinear", align_corners=False)
            outputs.append(fuse(torch.cat([meaning, details], dim=1)))
        return outputs

    @property
    def depth(self) -> int:
        """The number of the ViT's last layer; the adapter counts as part of it."""
        return self.vit.depth

    def depth_of(self, name: str) -> int:
        """The layer a parameter belongs to; the adapter's belong to the last."""
        part, _, rest = name.partition(".")
        return self.vit.depth_of(rest) if part == "vit" else self.depth
