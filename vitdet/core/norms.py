"""Normalisation by name."""

from __future__ import annotations

from torch import nn


def make_norm(name: str, width: int, *, eps: float = 1e-5) -> nn.Module:
    """``"layer"`` (arXiv 1607.06450) or ``"rms"`` (arXiv 1910.07467) over the last, ``width``-wide dimension."""
    if name == "layer":
        return nn.LayerNorm(width, eps=eps)
    if name == "rms":
        return nn.RMSNorm(width, eps=eps)
    raise ValueError(f"unknown norm {name!r}; use 'layer' or 'rms'")
