"""Boolean attention masks: True = may attend."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_mask(queries: int, memory: int, *, device: torch.device | str | None = None) -> Tensor:
    """(N, M): query n sees memory up to n + M - N, so that the last query sees everything."""
    return torch.ones(queries, memory, dtype=torch.bool, device=device).tril(memory - queries)


def group_mask(group_of_token: Tensor, *, shared_group: int) -> Tensor:
    """(N, N) from (N,) group numbers: tokens see their own group and the shared one; the shared one sees itself only.

    Denoising queries are such groups and the object queries the shared one: the ground truth that a denoising query
    carries must not leak to the object queries or to other groups (DN-DETR, arXiv 2203.01305, section 4.4).
    """
    own = group_of_token[:, None] == group_of_token[None, :]
    return own | (group_of_token[None, :] == shared_group)
