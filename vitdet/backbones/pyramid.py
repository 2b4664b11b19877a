"""ViTDet's simple feature pyramid: levels from the one map of a plain ViT (arXiv 2203.16527, section 3, figure 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from vitdet.core.norms import make_norm


class ChannelNorm(nn.Module):
    """Layer norm over the channels at each place of a map."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = make_norm("layer", width, eps=1e-6)

    def forward(self, maps: Tensor) -> Tensor:
        """(B, C, h, w) to the same."""
        return self.norm(maps.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def rescale(width: int, scale: float) -> tuple[list[nn.Module], int]:
    """Layers that make a map 4, 2, 1 or half times as large, and the channels they leave.

    Each transposed convolution halves the channels.
    """
    if scale == 4:
        double = nn.ConvTranspose2d(width, width // 2, 2, 2)
        return [
            double,
            ChannelNorm(width // 2),
            nn.GELU(),
            nn.ConvTranspose2d(width // 2, width // 4, 2, 2),
        ], width // 4
    if scale == 2:
        return [nn.ConvTranspose2d(width, width // 2, 2, 2)], width // 2
    if scale == 1:
        return [], width
    if scale == 0.5:
        return [nn.MaxPool2d(2, 2)], width
    raise ValueError(f"a pyramid's map is 4, 2, 1 or 0.5 times as large as the backbone's, got {scale}")


class Pyramid(nn.Module):
    """Levels of several sizes from the last map of a backbone.

    Args:
        backbone: its ``forward`` gives one map.
        width: C of every level.
        scales: of each level, how many times larger than the backbone's its map is: 4, 2, 1 or 0.5. The default gives
            strides 8, 16 and 32 from a ViT with patches of 16.
    """

    def __init__(self, backbone: nn.Module, *, width: int = 256, scales: Sequence[float] = (2, 1, 0.5)) -> None:
        super().__init__()
        self.backbone = cast("Any", backbone)
        if len(self.backbone.channels) != 1:
            raise ValueError(
                f"a pyramid stands on a backbone that gives 1 map, this one gives {self.backbone.channels}"
            )
        self.levels = nn.ModuleList()
        self.strides: list[int] = []
        for scale in scales:
            layers, channels = rescale(self.backbone.channels[0], scale)
            stride = self.backbone.strides[0] / scale
            if stride != int(stride):
                raise ValueError(
                    f"a map {scale} times as large as one of stride {self.backbone.strides[0]} has no stride"
                )
            leave = [nn.Conv2d(channels, width, 1, bias=False), ChannelNorm(width)]
            smooth = [nn.Conv2d(width, width, 3, padding=1, bias=False), ChannelNorm(width)]
            self.levels.append(nn.Sequential(*layers, *leave, *smooth))
            self.strides.append(int(stride))
        self.channels = [width] * len(self.strides)

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, h, w) to one (B, C, h/stride_s, w/stride_s) map per level."""
        (maps,) = self.backbone(images)
        return [level(maps) for level in self.levels]

    def tokens(self, images: Tensor) -> Tensor:
        """The backbone's own tokens (B, prefix + N, C')."""
        return self.backbone.tokens(images)

    @property
    def prefix_tokens(self) -> int:
        """How many of the tokens come before those of the patches."""
        return self.backbone.prefix_tokens

    @property
    def depth(self) -> int:
        """The number of the backbone's last layer; the levels count as part of it."""
        return self.backbone.depth

    def depth_of(self, name: str) -> int:
        """The layer a parameter belongs to; the levels' belong to the last."""
        part, _, rest = name.partition(".")
        return self.backbone.depth_of(rest) if part == "backbone" else self.depth

    def adapt(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same state with the backbone's position tables for this model."""
        inner = {name.removeprefix("backbone."): t for name, t in state.items() if name.startswith("backbone.")}
        return {**state, **{f"backbone.{name}": tensor for name, tensor in self.backbone.adapt(inner).items()}}
