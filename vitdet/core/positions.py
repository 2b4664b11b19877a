"""Positions: where a token stands, told by addition (sinusoidal, learnt), by rotation, or by a bias on the scores."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def exact_dtype(device: torch.device | str | None) -> torch.dtype:
    """float64, which keeps angles exact before the cast at the end; float32 on MPS, which has no other."""
    return torch.float32 if torch.device(device or "cpu").type == "mps" else torch.float64


def sinusoidal_1d(
    length: int, channels: int, *, start: int = 0, temperature: float = 10000.0,
    device: torch.device | str | None = None,
) -> Tensor:  # fmt: skip
    """The encodings of the 2017 paper (arXiv 1706.03762, section 3.5): channel 2i is sin(p / T^(2i/C)), 2i + 1 its cos.

    Args:
        length: N. channels: C, even. start: the first position p.

    Returns:
        (N, C) float32.
    """
    if channels % 2:
        raise ValueError(f"1-D sinusoidal positions need an even number of channels, got {channels}")
    angles = geometric_angles(start, length, channels // 2, temperature=temperature, device=device)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).to(torch.float32)


def geometric_angles(
    start: int, length: int, count: int, *, temperature: float, device: torch.device | str | None
) -> Tensor:
    """(N, count): positions start, start + 1, … times the frequencies 1 … 1/T, geometrically spaced."""
    place = torch.arange(start, start + length, dtype=exact_dtype(device), device=device)
    return place[:, None] * geometric_frequencies(count, temperature=temperature, device=device)


def geometric_frequencies(count: int, *, temperature: float, device: torch.device | str | None) -> Tensor:
    """(count,): 1 … nearly 1/T, geometrically spaced."""
    return temperature ** -(torch.arange(count, dtype=exact_dtype(device), device=device) / count)


def sinusoidal_2d(
    height: int, width: int, channels: int, *, temperature: float = 10000.0, device: torch.device | str | None = None
) -> Tensor:
    """Sine and cosine of y and x at geometric wavelengths, for a row-major map.

    The channels are [sin y | cos y | sin x | cos x], a quarter each. The published RT-DETR code walks the map column by
    column while its tokens are row-major, which is the same numbers on a square map and a permutation of them on any
    other; this order equals the published weights' on squares and stays right elsewhere.

    Args:
        height, width: of the map. channels: C, divisible by 4.

    Returns:
        (h·w, C) float32.
    """
    if channels % 4:
        raise ValueError(f"2-D sinusoidal positions need channels divisible by 4, got {channels}")
    rows = geometric_angles(0, height, channels // 4, temperature=temperature, device=device)  # (h, C/4)
    columns = geometric_angles(0, width, channels // 4, temperature=temperature, device=device)  # (w, C/4)
    by_row = torch.cat([rows.sin(), rows.cos()], dim=-1)[:, None].expand(height, width, -1)
    by_column = torch.cat([columns.sin(), columns.cos()], dim=-1)[None].expand(height, width, -1)
    return torch.cat([by_row, by_column], dim=-1).flatten(0, 1).to(torch.float32)  # (h·w, C)


def sinusoidal_shares(rows: Tensor, columns: Tensor, channels: int, *, temperature: float = 10000.0) -> Tensor:
    """DETR's positions (arXiv 2005.12872, section 3.2): sines and cosines of the share of the image before a place.

    Rows and columns are counted from 1 and divided by how many of them the image has, so that 2π stands at its lower
    and right edge whatever its size; padding counts for nothing. The channels are [y | x], each sine, cosine in turn.

    Args:
        rows, columns: (B, h) and (B, w) bool: which are within the image; these come first.
        channels: C, divisible by 4.

    Returns:
        (B, h·w, C) float32.
    """
    if channels % 4:
        raise ValueError(f"2-D sinusoidal positions need channels divisible by 4, got {channels}")
    height, width = rows.shape[1], columns.shape[1]
    frequencies = geometric_frequencies(channels // 4, temperature=temperature, device=rows.device)
    parts = []
    for valid in (rows, columns):
        place = valid.cumsum(1, dtype=frequencies.dtype)  # (B, n)
        angles = (2 * math.pi * place / (place[:, -1:] + 1e-6))[..., None] * frequencies  # (B, n, C/4)
        parts.append(torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(2))  # (B, n, C/2)
    by_row = parts[0][:, :, None].expand(-1, -1, width, -1)
    by_column = parts[1][:, None].expand(-1, height, -1, -1)
    return torch.cat([by_row, by_column], dim=-1).flatten(1, 2).to(torch.float32)  # (B, h·w, C)


class Rotation(NamedTuple):
    """Cosines and sines of the angles by which pairs of channels are turned, (N, D/2) each."""

    cos: Tensor
    sin: Tensor


def rotary_1d(
    length: int, head_width: int, *, start: int = 0, temperature: float = 10000.0,
    device: torch.device | str | None = None,
) -> Rotation:  # fmt: skip
    """Rotary positions of a sequence (RoFormer, arXiv 2104.09864, eq. 15): scores then depend on offsets only.

    Args:
        length: N. head_width: D, even. start: the first position, where a cache holds earlier ones.
    """
    if head_width % 2:
        raise ValueError(f"rotary positions need an even head width, got {head_width}")
    angles = geometric_angles(start, length, head_width // 2, temperature=temperature, device=device)
    return Rotation(angles.cos().to(torch.float32), angles.sin().to(torch.float32))


def rotary_2d(
    height: int, width: int, head_width: int, *, temperature: float = 100.0, prefix: int = 0,
    device: torch.device | str | None = None,
) -> Rotation:  # fmt: skip
    """Rotary positions of a map as DINOv3 has them (arXiv 2508.10104, section 3.1), with ``prefix`` unturned tokens.

    Patch centres lie in [-1, 1] along each axis whatever the size of the map; the first half of the angles follow y,
    the second x, with periods from 1 to nearly ``temperature``.

    Args:
        height, width: of the map. head_width: D, divisible by 4. prefix: class and register tokens, which come first.

    Returns:
        (prefix + h·w, D/2) cosines and sines.
    """
    if head_width % 4:
        raise ValueError(f"2-D rotary positions need a head width divisible by 4, got {head_width}")
    dtype, count = exact_dtype(device), head_width // 4
    frequencies = 2 * math.pi * geometric_frequencies(count, temperature=temperature, device=device)
    rows, columns = ((torch.arange(n, dtype=dtype, device=device) + 0.5) / n * 2 - 1 for n in (height, width))
    by_row = (rows[:, None] * frequencies)[:, None].expand(height, width, count)
    by_column = (columns[:, None] * frequencies)[None].expand(height, width, count)
    angles = F.pad(torch.cat([by_row, by_column], dim=-1).flatten(0, 1), (0, 0, prefix, 0))  # (prefix + h·w, D/2)
    return Rotation(angles.cos().to(torch.float32), angles.sin().to(torch.float32))


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Turn channel i and channel i + D/2 of (B, H, N, D) together, as one plane, by the token's angle."""
    cos, sin = (part.to(heads.dtype) for part in rotation)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def alibi_bias(heads: int, queries: int, memory: int, *, device: torch.device | str | None = None) -> Tensor:
    """(H, N, M): minus the distance times a slope a head (ALiBi, arXiv 2108.12409, section 3).

    The slopes are 2^(-8/H), 2^(-16/H), …; query n stands at n + M - N, as under a causal mask.
    """
    slopes = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, device=device))
    place = torch.arange(memory - queries, memory, device=device)[:, None]
    return -slopes[:, None, None] * (place - torch.arange(memory, device=device)).abs()


def resample_positions(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """A learnt table (1, h·w, C) of one grid for another (height, width), bicubic with antialiasing, in float32."""
    if old == new:
        return table
    grid = table.float().unflatten(1, old).permute(0, 3, 1, 2)  # (1, C, h, w)
    grid = F.interpolate(grid, size=new, mode="bicubic", antialias=True)
    return grid.permute(0, 2, 3, 1).flatten(1, 2).to(table.dtype)  # (1, h'·w', C)


class LearnedPositions(nn.Module):
    """One learnt vector for every place of a grid, resampled for any other grid (ViT, arXiv 2010.11929, section 3.2).

    Args:
        grid: (height, width) that ``table``, (1, height, width, C), is made for. channels: C.
    """

    def __init__(self, grid: tuple[int, int], channels: int) -> None:
        super().__init__()
        self.grid = grid
        self.table = nn.Parameter(torch.empty(1, *grid, channels))  # so that a state dict says which grid it is of
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, grid: tuple[int, int]) -> Tensor:
        """(1, h·w, C) for this grid."""
        return resample_positions(self.table.flatten(1, 2), self.grid, grid)
