"""Boolean attention masks: True = may attend."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_mask(queries: int, memory: int, *, device: torch.device | str | None = None) -> Tensor:
    """(N, M): query n sees memory up to n + M - N, so that the last query sees everything."""
    return torch.ones(queries, memory, dtype=torch.bool, device=device).tril(memory - queries)


def sliding_window_mask(queries: int, memory: int, window: int, *, device: torch.device | str | None = None) -> Tensor:
    """(N, M): query n stands at n + M - N and sees memory less than ``window`` away, on both sides.

    With :func:`causal_mask` that is the token itself and the window - 1 before it (Mistral, arXiv 2310.06825).
    """
    if window < 1:
        raise ValueError(f"a sliding window needs at least 1 token, got {window}")
    place = torch.arange(memory - queries, memory, device=device)[:, None]
    return (place - torch.arange(memory, device=device)).abs() < window


def padding_mask(real: Tensor) -> Tensor:
    """(B, 1, 1, M) from (B, M), which is False where a sequence is only filled up: that is seen by nobody."""
    return real[:, None, None]


def valid_cells(lengths: Tensor, length: int, cells: int) -> Tensor:
    """(B, cells) from (B,) lengths of images padded to ``length`` pixels: which rows or columns of a map are theirs.

    A cell is judged by the pixel at its beginning, nearest interpolation's, as DETR does.
    """
    inside = torch.arange(length, device=lengths.device) < lengths[:, None]  # (B, length)
    return F.interpolate(inside[None].float(), size=cells)[0].bool()


def group_mask(group_of_token: Tensor, *, shared_group: int) -> Tensor:
    """(N, N) from (N,) group numbers: tokens see their own group and the shared one; the shared one sees itself only.

    Denoising queries are such groups and the object queries the shared one: the ground truth that a denoising query
    carries must not leak to the object queries or to other groups (DN-DETR, arXiv 2203.01305, section 4.4).
    """
    own = group_of_token[:, None] == group_of_token[None, :]
    return own | (group_of_token[None, :] == shared_group)
