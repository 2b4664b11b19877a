"""Multi-scale deformable attention (Deformable DETR, arXiv 2010.04159, equation 3).

Each query reads P points per head around its reference box, spread over the levels, and weighs them. The weights come
from the query alone, not from a product with keys: cost grows with Q·P, not with Q·M.

RT-DETRv2 (arXiv 2407.17140, section 3) lets the levels have different numbers of points, and can read the nearest cell
instead of interpolating, for runtimes without ``grid_sample``. Where its code limits both coordinates of that cell by
the map's height, here each is limited by its own side: the same on square maps, right on the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLINGS = ("bilinear", "discrete")


def sample_levels(
    value: Tensor, shapes: list[tuple[int, int]], locations: Tensor, weights: Tensor, *, points: Sequence[int],
    sampling: str = "bilinear",
) -> Tensor:  # fmt: skip
    """Weighted sum of samples from maps of several sizes.

    Args:
        value: (B, M, H, D), the levels' row-major maps one after the other. shapes: their (h, w).
        locations: (B, Q, H, P, 2), (x, y) with (0, 0) the upper left and (1, 1) the lower right corner of the map;
            the points of the first level come first.
        weights: (B, Q, H, P). points: how many of the P points each level has.
        sampling: ``"bilinear"``: between the centres of cells, and outside a map is 0. ``"discrete"``: one cell, that
            at the border where the location is outside; the locations get no gradient.

    Returns:
        (B, Q, H·D).
    """
    batch, queries, heads, total = weights.shape
    grids = locations.transpose(1, 2).flatten(0, 1).split(list(points), dim=2)  # (B·H, Q, P_s, 2) each
    maps = value.permute(0, 2, 3, 1).flatten(0, 1)  # (B·H, D, M)
    sampled = []
    for start, (height, width), grid in zip(_starts(shapes), shapes, grids, strict=True):
        # In the grid's float32: bfloat16 coordinates would be off by up to a 25th of a cell of a 40-wide map.
        one = maps[..., start : start + height * width].to(grid.dtype)  # (B·H, D, h·w)
        if sampling == "discrete":
            sampled.append(_cells_at(one, grid, height, width))
        else:
            one = one.unflatten(-1, (height, width))  # (B·H, D, h, w)
            sampled.append(F.grid_sample(one, 2 * grid - 1, align_corners=False))  # (B·H, D, Q, P_s)
    flat_weights = weights.transpose(1, 2).reshape(batch * heads, 1, queries, total)
    mixed = (torch.cat(sampled, dim=-1) * flat_weights).sum(-1).to(value.dtype)  # (B·H, D, Q)
    return mixed.unflatten(0, (batch, heads)).permute(0, 3, 1, 2).flatten(2)  # (B, Q, H·D)


def _cells_at(cells: Tensor, grid: Tensor, height: int, width: int) -> Tensor:
    """One cell of each row-major map (N, D, h·w) at every location (N, Q, P, 2): (N, D, Q, P).

    Location x reads the cell ⌊x·w + 0.5⌋, half a cell beyond the one that covers x: so the published weights know it.
    """
    column = (grid[..., 0] * width + 0.5).long().clamp(0, width - 1)
    row = (grid[..., 1] * height + 0.5).long().clamp(0, height - 1)
    index = (row * width + column).flatten(1)  # (N, Q·P)
    found = cells.gather(-1, index[:, None].expand(-1, cells.shape[1], -1))  # (N, D, Q·P)
    return found.unflatten(-1, (grid.shape[1], grid.shape[2]))


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
        width: C. heads: must divide ``width``. levels: S.
        points: per level and head; or one number for each level.
        reach: how far an offset of as many steps as its level has points goes, as a share of the reference box's size:
            half of it, to the box's edge, as published.
        sampling: see :func:`sample_levels`. With ``"discrete"`` nothing tells the offsets how to change, and they stay
            as they are.
        project: whether values and result go through a linear layer each (not in D-FINE, arXiv 2410.13842, table 3).

    Raises:
        ValueError: heads that do not divide the width, another number of levels' points, an unknown sampling.
    """

    def __init__(
        self, width: int, heads: int, *, levels: int, points: int | Sequence[int], reach: float = 0.5,
        sampling: str = "bilinear", project: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        if width % heads:
            raise ValueError(f"heads must divide the width, got {width=}, {heads=}")
        self.points = (points,) * levels if isinstance(points, int) else tuple(points)
        if len(self.points) != levels or min(self.points) < 1:
            raise ValueError(
                f"points are one number, or one for each of the {levels} levels, at least 1; got {list(self.points)}"
            )
        if sampling not in SAMPLINGS:
            raise ValueError(f"unknown sampling {sampling!r}; use one of {list(SAMPLINGS)}")
        self.heads, self.reach, self.sampling = heads, reach, sampling
        self.offsets = nn.Linear(width, heads * sum(self.points) * 2)
        self.weights = nn.Linear(width, heads * sum(self.points))
        self.value = nn.Linear(width, width) if project else nn.Identity()
        self.out = nn.Linear(width, width) if project else nn.Identity()
        self.reset_parameters()
        self.offsets.requires_grad_(sampling != "discrete")

    def reset_parameters(self) -> None:
        """Point p of head i starts p + 1 steps from the reference in the head's own direction, all equally weighted."""
        angles = torch.arange(self.heads) * (2 * math.pi / self.heads)
        directions = torch.stack([angles.cos(), angles.sin()], dim=-1)
        directions = directions / directions.abs().amax(-1, keepdim=True)  # onto the unit square, as published
        steps = torch.cat([torch.arange(1, count + 1) for count in self.points])  # (P,)
        nn.init.zeros_(self.offsets.weight)
        with torch.no_grad():
            self.offsets.bias.copy_((directions[:, None] * steps[:, None]).reshape(-1))  # (H, P, 2), flat
        for layer in (self.value, self.out):
            if isinstance(layer, nn.Linear):
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
            reference_boxes: (B, Q, 4) ``cxcywh`` in [0, 1], around which the points lie.
            query_pos: (B, Q, C), added to the tokens before offsets and weights are read off them.

        Returns:
            (B, Q, C).
        """
        query = tokens if query_pos is None else tokens + query_pos
        value = self.value(memory).unflatten(-1, (self.heads, -1))  # (B, M, H, D)
        # Coordinates need more than bfloat16's 8 bits: half a cell of a 40-wide map is 1/80.
        offsets = self.offsets(query).unflatten(-1, (self.heads, -1, 2)).float()  # (B, Q, H, P, 2)
        weights = self.weights(query).unflatten(-1, (self.heads, -1)).float().softmax(-1)  # (B, Q, H, P)
        centre, size = reference_boxes.float()[:, :, None, None].split(2, dim=-1)  # (B, Q, 1, 1, 2)
        locations = centre + self._in_boxes(offsets) * size
        sampled = sample_levels(value, shapes, locations, weights, points=self.points, sampling=self.sampling)
        return self.out(sampled)

    def _in_boxes(self, offsets: Tensor) -> Tensor:
        """Steps (B, Q, H, P, 2) as shares of the box's size."""
        if len(set(self.points)) == 1:
            return offsets * (self.reach / self.points[0])
        parts = zip(offsets.split(list(self.points), dim=3), self.points, strict=True)
        return torch.cat([part * (self.reach / count) for part, count in parts], dim=3)
