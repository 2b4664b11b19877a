"""RT-DETR's efficient hybrid encoder (arXiv 2304.08069, section 4.2): AIFI and CCFF.

AIFI attends within the coarsest map alone (400 tokens at 640×640), where attention is cheap and concepts are formed.
CCFF then fuses the maps top-down and bottom-up with convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdet.backbones.layers import ACTIVATIONS, ConvNorm, dense_gradient
from vitdet.core.blocks import EncoderBlock
from vitdet.core.positions import sinusoidal_2d


class RepVggBlock(nn.Module):
    """A 3×3 and a 1×1 convolution side by side, which can be merged for inference (arXiv 2101.03697)."""

    def __init__(self, width: int, *, activation: str) -> None:
        super().__init__()
        self.conv3 = ConvNorm(width, width, 3)
        self.conv1 = ConvNorm(width, width, 1)
        self.activation = ACTIVATIONS[activation]()

    def forward(self, maps: Tensor) -> Tensor:
        """(B, C, h, w), kept."""
        return self.activation(self.conv3(maps) + self.conv1(maps))


class FusionBlock(nn.Module):
    """Fuses two concatenated maps: a chain of RepVGG blocks beside a 1×1 shortcut (arXiv 2304.08069, figure 4)."""

    def __init__(self, width_in: int, width: int, *, hidden: int, blocks: int, activation: str) -> None:
        super().__init__()
        self.enter = ConvNorm(width_in, hidden, 1, activation=activation)
        self.shortcut = ConvNorm(width_in, hidden, 1, activation=activation)
        self.blocks = nn.Sequential(*[RepVggBlock(hidden, activation=activation) for _ in range(blocks)])
        self.leave = ConvNorm(hidden, width, 1, activation=activation) if hidden != width else nn.Identity()

    def forward(self, maps: Tensor) -> Tensor:
        """(B, C_in, h, w) to (B, C, h, w)."""
        return self.leave(self.blocks(self.enter(maps)) + self.shortcut(maps))


class HybridEncoder(nn.Module):
    """Maps of a backbone to as many fused maps of one width.

    Args:
        channels: of the backbone's maps, finest first; each is half the size of the one before.
        width: C, of all outputs. heads, hidden, layers: of AIFI on the last map.
        expansion: inner width of the fusion blocks over C. blocks: RepVGG blocks in each.
        activation: of the convolutions.
    """

    def __init__(
        self, channels: Sequence[int], *, width: int = 256, heads: int = 8, hidden: int = 1024, layers: int = 1,
        expansion: float = 1.0, blocks: int = 3, activation: str = "silu",
    ) -> None:  # fmt: skip
        super().__init__()
        fine_levels = len(channels) - 1
        self.project = nn.ModuleList(ConvNorm(c, width, 1) for c in channels)
        self.attend = nn.ModuleList(EncoderBlock(width, heads, hidden, activation="gelu") for _ in range(layers))

        def fusion() -> FusionBlock:
            return FusionBlock(2 * width, width, hidden=round(width * expansion), blocks=blocks, activation=activation)

        self.lateral = nn.ModuleList(ConvNorm(width, width, 1, activation=activation) for _ in range(fine_levels))
        self.top_down = nn.ModuleList(fusion() for _ in range(fine_levels))
        self.downsample = nn.ModuleList(
            ConvNorm(width, width, 3, stride=2, activation=activation) for _ in range(fine_levels)
        )
        self.bottom_up = nn.ModuleList(fusion() for _ in range(fine_levels))
        self.channels = [width] * len(channels)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """(B, C_s, h/2^s, w/2^s) maps to (B, C, h/2^s, w/2^s) maps, finest first. Any h and w that halve evenly."""
        maps = [dense_gradient(project(one)) for project, one in zip(self.project, maps, strict=True)]
        maps[-1] = self.attend_within(maps[-1])
        coarse = maps[-1]
        fused: list[Tensor] = []
        for fine, lateral, block in zip(reversed(maps[:-1]), self.lateral, self.top_down, strict=True):
            coarse = lateral(coarse)
            fused.append(coarse)
            coarse = block(torch.cat([F.interpolate(coarse, scale_factor=2.0, mode="nearest"), fine], dim=1))
        outputs = [coarse]
        for lateral_map, downsample, block in zip(reversed(fused), self.downsample, self.bottom_up, strict=True):
            outputs.append(block(torch.cat([downsample(outputs[-1]), lateral_map], dim=1)))
        return outputs

    def attend_within(self, maps: Tensor) -> Tensor:
        """AIFI: self-attention over one map (B, C, h, w), its positions made for this h and w."""
        height, width = maps.shape[-2:]
        tokens = maps.flatten(2).transpose(1, 2)  # (B, N, C)
        pos = sinusoidal_2d(height, width, tokens.shape[-1], device=tokens.device).to(tokens.dtype)[None]
        for block in self.attend:
            tokens = block(tokens, query_pos=pos)
        return tokens.transpose(1, 2).unflatten(-1, (height, width))  # (B, C, h, w)
