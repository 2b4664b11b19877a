"""RT-DETR's efficient hybrid encoder (arXiv 2304.08069, section 4.2): AIFI and CCFF, and its relatives.

AIFI attends within the coarsest map alone (400 tokens at 640×640), where attention is cheap and concepts are formed.
CCFF then fuses the maps top-down and bottom-up with convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdet.backbones.layers import ACTIVATIONS, ConvNorm, dense_gradient, level_projections
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
    """Fuses two joined maps: a chain of RepVGG blocks beside a 1×1 shortcut (arXiv 2304.08069, figure 4)."""

    def __init__(self, width_in: int, width: int, *, hidden: int, blocks: int, activation: str) -> None:
        super().__init__()
        self.enter = ConvNorm(width_in, hidden, 1, activation=activation)
        self.shortcut = ConvNorm(width_in, hidden, 1, activation=activation)
        self.blocks = nn.Sequential(*[RepVggBlock(hidden, activation=activation) for _ in range(blocks)])
        self.leave = ConvNorm(hidden, width, 1, activation=activation) if hidden != width else nn.Identity()

    def forward(self, maps: Tensor) -> Tensor:
        """(B, C_in, h, w) to (B, C, h, w)."""
        return self.leave(self.blocks(self.enter(maps)) + self.shortcut(maps))


class ChainedFusionBlock(nn.Module):
    """Fuses two joined maps: half of the channels pass two fusion blocks, and all steps are kept.

    D-FINE's (arXiv 2410.13842, section 5.1), of the family GELAN (arXiv 2402.13616, figure 4).

    Args:
        width_in, width: channels before and after. hidden: of each of the two blocks. blocks: RepVGG blocks in each.
        smooth: whether a 3×3 convolution follows each block (not in DEIMv2's models on a ViT).
    """

    def __init__(
        self, width_in: int, width: int, *, hidden: int, blocks: int, activation: str, smooth: bool = True
    ) -> None:
        super().__init__()

        def chain(before: int) -> nn.Sequential:
            block = FusionBlock(before, hidden, hidden=hidden, blocks=blocks, activation=activation)
            return nn.Sequential(block, *([ConvNorm(hidden, hidden, 3, activation=activation)] if smooth else []))

        self.enter = ConvNorm(width_in, 2 * width, 1, activation=activation)
        self.chains = nn.ModuleList(chain(before) for before in (width, hidden))
        self.leave = ConvNorm(2 * width + 2 * hidden, width, 1, activation=activation)

    def forward(self, maps: Tensor) -> Tensor:
        """(B, C_in, h, w) to (B, C, h, w)."""
        kept = list(self.enter(maps).chunk(2, dim=1))
        for one in self.chains:
            kept.append(one(kept[-1]))
        return self.leave(torch.cat(kept, dim=1))


FUSIONS = ("csp", "elan", "plain_elan", "lite")


def make_encoder(
    channels: Sequence[int], *, fusion: str, width: int, heads: int, hidden: int, expansion: float, blocks: int,
    summed: bool, project_maps: bool,
) -> HybridEncoder | LiteEncoder:  # fmt: skip
    """The encoder of this kind: ``"lite"`` is :class:`LiteEncoder`, the others are :class:`HybridEncoder`'s."""
    if fusion == "lite":
        return LiteEncoder(channels, width=width, expansion=expansion, blocks=blocks)
    return HybridEncoder(
        channels, width=width, heads=heads, hidden=hidden, expansion=expansion, blocks=blocks, fusion=fusion,
        summed=summed, always_project=project_maps,
    )  # fmt: skip


class HybridEncoder(nn.Module):
    """Maps of a backbone to as many fused maps of one width.

    Args:
        channels: of the backbone's maps, finest first; each is half the size of the one before.
        width: C, of all outputs. heads, hidden, layers: of AIFI on the last map.
        expansion: inner width of the fusion blocks over C, or over C / 2 in ``"elan"``. blocks: RepVGG blocks in each.
        activation: of the convolutions.
        fusion: ``"csp"``, RT-DETR's, of :class:`FusionBlock`; ``"elan"``, D-FINE's, of :class:`ChainedFusionBlock`,
            whose maps are halved channel by channel, and pass between the levels without activation;
            ``"plain_elan"``, DEIMv2's, the same without smoothing.
        summed: whether two maps are joined by addition (DEIMv2) instead of concatenation.
        always_project: whether maps are projected even where they have the encoder's width already.
    """

    def __init__(
        self, channels: Sequence[int], *, width: int = 256, heads: int = 8, hidden: int = 1024, layers: int = 1,
        expansion: float = 1.0, blocks: int = 3, activation: str = "silu", fusion: str = "csp", summed: bool = False,
        always_project: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        if fusion not in FUSIONS[:3]:
            raise ValueError(f"unknown fusion {fusion!r}; use one of {list(FUSIONS)}")
        chained, self.summed = fusion != "csp", summed
        fine_levels = len(channels) - 1
        self.project = level_projections(channels, width, always=always_project)
        self.attend = nn.ModuleList(EncoderBlock(width, heads, hidden, activation="gelu") for _ in range(layers))
        inner = int(width * expansion // 2) if chained else round(width * expansion)

        def fuse() -> nn.Module:
            kind = partial(ChainedFusionBlock, smooth=fusion == "elan") if chained else FusionBlock
            return kind(width if summed else 2 * width, width, hidden=inner, blocks=blocks, activation=activation)

        def halve() -> nn.Module:
            if not chained:
                return ConvNorm(width, width, 3, stride=2, activation=activation)
            return nn.Sequential(ConvNorm(width, width, 1), ConvNorm(width, width, 3, stride=2, groups=width))

        between = "none" if chained else activation
        self.lateral = nn.ModuleList(ConvNorm(width, width, 1, activation=between) for _ in range(fine_levels))
        self.top_down = nn.ModuleList(fuse() for _ in range(fine_levels))
        self.downsample = nn.ModuleList(halve() for _ in range(fine_levels))
        self.bottom_up = nn.ModuleList(fuse() for _ in range(fine_levels))
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
            coarse = block(self.join(F.interpolate(coarse, scale_factor=2.0, mode="nearest"), fine))
        outputs = [coarse]
        for lateral_map, downsample, block in zip(reversed(fused), self.downsample, self.bottom_up, strict=True):
            outputs.append(block(self.join(downsample(outputs[-1]), lateral_map)))
        return outputs

    def join(self, one: Tensor, other: Tensor) -> Tensor:
        """Two (B, C, h, w) maps added, or as (B, 2C, h, w)."""
        return one + other if self.summed else torch.cat([one, other], dim=1)

    def attend_within(self, maps: Tensor) -> Tensor:
        """AIFI: self-attention over one map (B, C, h, w), its positions made for this h and w."""
        height, width = maps.shape[-2:]
        tokens = maps.flatten(2).transpose(1, 2)  # (B, N, C)
        pos = sinusoidal_2d(height, width, tokens.shape[-1], device=tokens.device).to(tokens.dtype)[None]
        for block in self.attend:
            tokens = block(tokens, query_pos=pos)
        return tokens.transpose(1, 2).unflatten(-1, (height, width))  # (B, C, h, w)


class LiteEncoder(nn.Module):
    """Two fused maps from a backbone's one, without attention: for DEIMv2's smallest (arXiv 2509.20787, section 3.3).

    Args:
        channels: of the one map. width: C, of both outputs.
        expansion, blocks, activation: as of :class:`HybridEncoder` with ``"elan"``.
    """

    def __init__(
        self, channels: Sequence[int], *, width: int, expansion: float = 1.0, blocks: int = 3, activation: str = "silu"
    ) -> None:
        super().__init__()
        if len(channels) != 1:
            raise ValueError(f"the lite encoder takes one map of a backbone, this one gives {len(channels)}")

        def mix() -> ConvNorm:
            return ConvNorm(width, width, 1, activation=activation)

        def fuse() -> ChainedFusionBlock:
            inner = int(width * expansion // 2)
            return ChainedFusionBlock(width, width, hidden=inner, blocks=blocks, activation=activation)

        self.project = nn.ModuleList([ConvNorm(channels[0], width, 1)])
        self.pool = nn.AvgPool2d(3, stride=2, padding=1)
        self.coarsen, self.globalise = mix(), mix()
        self.top_down = fuse()
        self.downsample = mix()
        self.bottom_up = fuse()
        self.channels = [width] * 2

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """One (B, C_in, h, w) map to maps (B, C, h, w) and (B, C, h/2, w/2); h and w even."""
        fine = self.project[0](maps[0])
        coarse = self.coarsen(self.pool(fine))
        coarse = self.globalise(coarse + coarse.mean(dim=(2, 3), keepdim=True))
        fine = self.top_down(fine + F.interpolate(coarse, scale_factor=2.0, mode="nearest"))
        return [fine, self.bottom_up(coarse + self.downsample(self.pool(fine)))]
