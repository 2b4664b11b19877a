"""Multi-scale deformable attention (Deformable DETR, arXiv 2010.04159, equation 3).

Each query reads P points per level and head around its reference box, and weighs them. The weights come from the query
alone, not from a product with keys: cost grows with Q·S·P, not with Q·M.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def sample_levels(value: Tensor, shapes: list[tuple[int, int]], locations: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of bilinear samples from maps of several sizes; outside a map is 0.

    Args:
        value: (B, M, H, D), the levels' row-major maps one after the other. shapes: their (h, w).
        locations: (B, Q, H, S, P, 2), (x, y) with (0, 0) the upper left and (1, 1) the lower right corner of the map.
        weights: (B, Q, H, S, P).

    Returns:
        (B, Q, H·D).
    """
    batch, queries, heads, levels, points = weights.shape
    grid = (2 * locations - 1).permute(3, 0, 2, 1, 4, 5).flatten(1, 2)  # (S, B·H, Q, P, 2)
    maps = value.permute(0, 2, 3, 1).flatten(0, 1)  # (B·H, D, M)
    sampled = []
    for level, (start, (height, width)) in enumerate(zip(_starts(shapes), shapes, strict=True)):
        one = maps[..., start : start + height * width].unflatten(-1, (height, width))  # (B·H, D, h, w)
        # In the grid's float32: bfloat16 coordinates would be off by up to a 25th of a cell of a 40-wide map.
        sampled.append(F.grid_sample(one.to(grid.dtype), grid[level], align_corners=False))  # (B·H, D, Q, P)
    flat_weights = weights.permute(0, 2, 1, 3, 4).reshape(batch * heads, 1, queries, levels * points)
    mixed = (torch.cat(sampled, dim=-1) * flat_weights).sum(-1).to(value.dtype)  # (B·H, D, Q)
    return mixed.unflatten(0, (batch, heads)).permute(0, 3, 1, 2).flatten(2)  # (B, Q, H·D)


def _starts(shapes: list[tuple[int, int]]) -> list[int]:
    """Where each level begins among the M memory tokens."""
    starts, total = [], 0
    for height, width in shapes:
        starts.append(total)
        total += height * width
    return starts


class DeformableAttention(nn.Module):
    """Cross-attention that samples the memory around reference boxes.

    Args:
        width: C. heads: must divide ``width``. levels: S. points: P, per level and head.
    """

    def __init__(self, width: int, heads: int, *, levels: int, points: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads must divide the width, got {width=}, {heads=}")
        self.heads, self.levels, self.points = heads, levels, points
        self.offsets = nn.Linear(width, heads * levels * points * 2)
        self.weights = nn.Linear(width, heads * levels * points)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Point p of head i starts p + 1 steps from the reference in the head's own direction, all equally weighted."""
        angles = torch.arange(self.heads) * (2 * math.pi / self.heads)
        directions = torch.stack([angles.cos(), angles.sin()], dim=-1)
        directions = directions / directions.abs().amax(-1, keepdim=True)  # onto the unit square, as published
        steps = torch.arange(1, self.points + 1)
        start = (directions[:, None, None, :] * steps[None, None, :, None]).expand(-1, self.levels, -1, -1)
        nn.init.zeros_(self.offsets.weight)
        with torch.no_grad():
            self.offsets.bias.copy_(start.reshape(-1))
        for layer in (self.value, self.out):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        nn.init.zeros_(self.weights.weight)
        nn.init.zeros_(self.weights.bias)

    def forward(
        self, tokens: Tensor, memory: Tensor, *, reference_boxes: Tensor, shapes: list[tuple[int, int]],
        query_pos: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend.

        Args:
            tokens: (B, Q, C). memory: (B, M, C), M = Σ h·w. shapes: (h, w) of each level.
            reference_boxes: (B, Q, 4) ``cxcywh`` in [0, 1]; an offset of P steps reaches the box's edge.
            query_pos: (B, Q, C), added to the tokens before offsets and weights are read off them.

        Returns:
            (B, Q, C).
        """
        query = tokens if query_pos is None else tokens + query_pos
        value = self.value(memory).unflatten(-1, (self.heads, -1))  # (B, M, H, D)
        shape = (self.heads, self.levels, self.points)
        # Coordinates need more than bfloat16's 8 bits: half a cell of a 40-wide map is 1/80.
        offsets = self.offsets(query).unflatten(-1, (*shape, 2)).float()  # (B, Q, H, S, P, 2)
        weights = self.weights(query).unflatten(-1, (self.heads, -1)).float().softmax(-1).unflatten(-1, shape[1:])
        centre, size = reference_boxes.float()[:, :, None, None, None].split(2, dim=-1)  # (B, Q, 1, 1, 1, 2)
        locations = centre + offsets * size * (0.5 / self.points)
        return self.out(sample_levels(value, shapes, locations, weights))
