"""Attention within windows of a map, shifted in every other block (Swin, arXiv 2103.14030; v2, arXiv 2111.09883).

To the one :class:`~vitdet.core.attention.Attention` a window is a short sequence; what is here cuts a map into windows,
puts it together again, and says where in a window its tokens stand.

A map that the window does not divide is padded with zeros at its lower and right edge before the shift, and the padding
is attended to, as in the official detection code, torchvision and transformers. timm shifts before it pads: there, on
such maps only, tokens from opposite edges see each other. On a map smaller than the window the window shrinks to it.

Where all of those part the pieces of a shifted window by adding -100 to the scores between them, here a mask does.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdet.core.feedforward import MLP
from vitdet.core.positions import exact_dtype


def fit_window(
    window: tuple[int, int], grid: tuple[int, int], *, shifted: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(height, width) of the window on this map, and of its shift: half a window, none where one window spans the map.

    Args:
        window: as wished. grid: (h, w) of the map. shifted: whether to shift at all.
    """
    shift = tuple(side // 2 if shifted and side < whole else 0 for side, whole in zip(window, grid, strict=True))
    return (min(window[0], grid[0]), min(window[1], grid[1])), (shift[0], shift[1])


def partition_windows(maps: Tensor, window: tuple[int, int]) -> Tensor:
    """(B, h, w, C), divisible by the window, to (B·W, n, C): W windows an image, row-major, of n row-major tokens."""
    cut = maps.unflatten(2, (-1, window[1])).unflatten(1, (-1, window[0]))  # (B, rows, wh, columns, ww, C)
    return cut.transpose(2, 3).flatten(3, 4).flatten(0, 2)  # (B·W, n, C)


def merge_windows(windows: Tensor, window: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """The inverse of :func:`partition_windows`: (B·W, n, C) to (B, h, w, C)."""
    rows, columns = grid[0] // window[0], grid[1] // window[1]
    cut = windows.unflatten(1, window).unflatten(0, (-1, rows, columns))  # (B, rows, columns, wh, ww, C)
    return cut.transpose(2, 3).flatten(3, 4).flatten(1, 2)  # (B, h, w, C)


def shifted_window_mask(
    grid: tuple[int, int], window: tuple[int, int], shift: tuple[int, int], *, device: torch.device | str | None = None
) -> Tensor:
    """(W, n, n), True = may attend, for a map rolled up and left by ``shift`` (arXiv 2103.14030, figure 4).

    The last ``shift`` rows and columns came from the other edge: the others of their windows are no neighbours.

    Args:
        grid: (h, w) of the map, divisible by the window.
    """
    rows, columns = (torch.arange(side, device=device) >= side - moved for side, moved in zip(grid, shift, strict=True))
    origin = 2 * rows[:, None].long() + columns.long()  # (h, w)
    origin = partition_windows(origin[None, :, :, None], window)  # (W, n, 1)
    return origin == origin.transpose(1, 2)


def relative_index(
    window: tuple[int, int], within: tuple[int, int], *, device: torch.device | str | None = None
) -> Tensor:
    """(n, n): the row that a table of a window ``within``'s offsets has for token i minus token j of ``window``.

    The table has (2h - 1)·(2w - 1) rows, row-major from the offset (1 - h, 1 - w); ``window`` is not larger.
    """
    rows, columns = (torch.arange(side, device=device) for side in window)
    down = rows[:, None] - rows + within[0] - 1  # (wh, wh)
    right = columns[:, None] - columns + within[1] - 1  # (ww, ww)
    index = down[:, None, :, None] * (2 * within[1] - 1) + right[None, :, None, :]  # (wh, ww, wh, ww)
    return index.flatten(2).flatten(0, 1)


def pairwise_bias(table: Tensor, window: tuple[int, int], within: tuple[int, int]) -> Tensor:
    """(1, H, n, n) from a table (offsets, H) of the window ``within``, for ``window``."""
    index = relative_index(window, within, device=table.device)
    # index_select: its backward adds row by row, which is quicker than that of table[index].
    return table.index_select(0, index.flatten()).unflatten(0, index.shape).permute(2, 0, 1)[None]


class TableBias(nn.Module):
    """A learnt number for every offset within a window, a head each (arXiv 2103.14030, eq. 4).

    Args:
        window: (height, width), the largest that can be asked for. heads: H.
    """

    def __init__(self, window: tuple[int, int], heads: int) -> None:
        super().__init__()
        self.window = window
        self.table = nn.Parameter(torch.empty((2 * window[0] - 1) * (2 * window[1] - 1), heads))
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, window: tuple[int, int]) -> Tensor:
        """(1, H, n, n) for a window of this size."""
        return pairwise_bias(self.table, window, self.window)


def log_offsets(
    window: tuple[int, int], reference: tuple[int, int], *, device: torch.device | str | None = None
) -> Tensor:
    """((2h - 1)·(2w - 1), 2): each offset's log-spaced (y, x), sign(d) log2(1 + |d|) / 3 (arXiv 2111.09883, eq. 4).

    The largest offset in the ``reference`` window has |d| = 8, as in the published code, and so the value log2(9) / 3.
    """
    axes = []
    for side, whole in zip(window, reference, strict=True):
        offset = torch.arange(1 - side, side, device=device, dtype=exact_dtype(device)) * (8 / max(whole - 1, 1))
        axes.append(offset.sign() * (offset.abs() + 1).log2() / math.log2(8))
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)


class ContinuousBias(nn.Module):
    """A small network of the log-spaced offset gives the bias, so that it transfers to other windows.

    Its output goes through 16 · sigmoid, as in the published code (arXiv 2111.09883, section 3.3).

    Args:
        reference: the window that the network was (first) trained with: offsets are relative to its size. heads: H.
        hidden: width of the network.
    """

    undecayed = True  # as published: weight decay would pull every bias to 8

    def __init__(self, reference: tuple[int, int], heads: int, *, hidden: int = 512) -> None:
        super().__init__()
        self.reference = reference
        self.mlp = MLP(2, hidden, heads, layers=2, out_bias=False)

    def forward(self, window: tuple[int, int]) -> Tensor:
        """(1, H, n, n) for a window of this size."""
        weight = next(self.mlp.parameters())
        offsets = log_offsets(window, self.reference, device=weight.device).to(weight.dtype)
        return pairwise_bias(16 * self.mlp(offsets).sigmoid(), window, window)


class WindowAttention(nn.Module):
    """Attention of each token to those of its window.

    Args:
        attention: called as ``attention(tokens, mask=…, bias=…, collect=…)`` with a window in the place of a sequence.
        position_bias: called with a window's (height, width), gives (1, H, n, n).
        window: (height, width). shifted: whether the windows stand half a window further down and right.
    """

    def __init__(
        self, attention: nn.Module, *, position_bias: nn.Module, window: tuple[int, int], shifted: bool
    ) -> None:
        super().__init__()
        if min(window) < 1:
            raise ValueError(f"a window holds at least 1 token, got (height, width) {window}")
        self.attention, self.position_bias = attention, position_bias
        self.window, self.shifted = window, shifted

    def forward(self, tokens: Tensor, *, grid: tuple[int, int], collect: list[Tensor] | None = None) -> Tensor:
        """Attend.

        Args:
            tokens: (B, h·w, C), row-major. grid: (h, w).
            collect: a list that the weights (B·W, H, n, n) are appended to.

        Returns:
            (B, h·w, C).
        """
        window, shift = fit_window(self.window, grid, shifted=self.shifted)
        below, right = (-side % step for side, step in zip(grid, window, strict=True))
        padded = (grid[0] + below, grid[1] + right)
        maps = F.pad(tokens.unflatten(1, grid), (0, 0, 0, right, 0, below))  # (B, h', w', C)
        mask = None
        if any(shift):
            maps = maps.roll((-shift[0], -shift[1]), dims=(1, 2))
            mask = shifted_window_mask(padded, window, shift, device=tokens.device)
            mask = mask.repeat(tokens.shape[0], 1, 1)[:, None]  # (B·W, 1, n, n)
        windows = partition_windows(maps, window)  # (B·W, n, C)
        windows = self.attention(windows, mask=mask, bias=self.position_bias(window), collect=collect)
        maps = merge_windows(windows, window, padded)
        if any(shift):
            maps = maps.roll(shift, dims=(1, 2))
        return maps[:, : grid[0], : grid[1]].flatten(1, 2)  # (B, h·w, C)
