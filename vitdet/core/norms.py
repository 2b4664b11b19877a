"""Normalisation by name."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """torch's, with the weight in the input's type: mixed types are not fused, and warned of, on a CPU in bfloat16."""

    def forward(self, tokens: Tensor) -> Tensor:
        """(…, C) to the same."""
        return F.rms_norm(tokens, self.normalized_shape, self.weight.to(tokens.dtype), self.eps)


def make_norm(name: str, width: int, *, eps: float = 1e-5) -> nn.Module:
    """``"layer"`` (arXiv 1607.06450) or ``"rms"`` (arXiv 1910.07467) over the last, ``width``-wide dimension."""
    if name == "layer":
        return nn.LayerNorm(width, eps=eps)
    if name == "rms":
        return RMSNorm(width, eps=eps)
    raise ValueError(f"unknown norm {name!r}; use 'layer' or 'rms'")


class UnitNorm(nn.Module):
    """Heads (B, H, N, D) of length 1, times √D · exp(s) with a learnt s a head where ``heads`` is given.

    For queries with it and keys without, the scores after attention's 1/√D are exp(s) cos(q, k): the scaled cosine
    attention of Swin v2 (arXiv 2111.09883, eq. 2), whose exp(s) starts at 10 and is at most 100.
    """

    def __init__(self, *, heads: int | None = None) -> None:
        super().__init__()
        self.log_scale: nn.Parameter | None = None
        if heads is not None:
            self.log_scale = nn.Parameter(torch.full((heads, 1, 1), math.log(10.0)))

    def forward(self, heads: Tensor) -> Tensor:
        """(B, H, N, D) to the same."""
        unit = F.normalize(heads, dim=-1)
        if self.log_scale is None:
            return unit
        scale = self.log_scale.clamp(max=math.log(100.0)).exp() * heads.shape[-1] ** 0.5  # (H, 1, 1)
        return unit * scale.to(unit.dtype)


def make_qk_norm(name: str | None, heads: int, head_width: int) -> tuple[nn.Module, nn.Module]:
    """What queries and keys go through before their product, head by head.

    None leaves them; ``"rms"`` or ``"layer"`` normalises each (arXiv 2302.05442, section 2); ``"cosine"`` compares
    directions only, see :class:`UnitNorm`.
    """
    if name is None:
        return nn.Identity(), nn.Identity()
    if name == "cosine":
        return UnitNorm(heads=heads), UnitNorm()
    return make_norm(name, head_width, eps=1e-6), make_norm(name, head_width, eps=1e-6)
