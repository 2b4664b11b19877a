"""Positions: where a token stands."""

from __future__ import annotations

import torch
from torch import Tensor


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
    quarter = channels // 4
    # MPS has no float64; on the others it keeps the frequencies exact before the cast at the end.
    dtype = torch.float32 if torch.device(device or "cpu").type == "mps" else torch.float64
    frequencies = temperature ** -(torch.arange(quarter, dtype=dtype, device=device) / quarter)  # (C/4,)
    rows = torch.arange(height, dtype=dtype, device=device)[:, None] * frequencies  # (h, C/4)
    columns = torch.arange(width, dtype=dtype, device=device)[:, None] * frequencies  # (w, C/4)
    by_row = torch.cat([rows.sin(), rows.cos()], dim=-1)[:, None].expand(height, width, -1)
    by_column = torch.cat([columns.sin(), columns.cos()], dim=-1)[None].expand(height, width, -1)
    return torch.cat([by_row, by_column], dim=-1).flatten(0, 1).to(torch.float32)  # (h·w, C)
