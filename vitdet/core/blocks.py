"""Encoder and decoder blocks: residual branches of attention and feed-forward, and where their norms stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitdet.core.attention import Attention
from vitdet.core.feedforward import FeedForward
from vitdet.core.norms import make_norm

PLACEMENTS = ("post", "pre", "peri", "res_post")


class DropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382): in training, drops a sample's whole branch and scales up those kept."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"drop_path is the probability of dropping a branch, in [0, 1), got {rate}")
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        """(B, …) to the same."""
        if not self.training or self.rate == 0:
            return branch
        kept = torch.rand(branch.shape[0], *[1] * (branch.ndim - 1), device=branch.device) >= self.rate
        return branch * (kept / (1 - self.rate)).to(branch.dtype)


class LayerScale(nn.Module):
    """A learnt factor a channel, small at first, on a branch (CaiT, arXiv 2103.17239, eq. 4)."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((width,), start))

    def forward(self, branch: Tensor) -> Tensor:
        """(…, C) to the same."""
        return branch * self.factor


class Residual(nn.Module):
    """``x`` and a branch ``f`` of it, added.

    Args:
        width: C.
        placement: ``"post"``: norm(x + f(x)) (arXiv 1706.03762; DETR); ``"pre"``: x + f(norm(x)) (ViT);
            ``"peri"``: x + norm'(f(norm(x))) (arXiv 2502.02732); ``"res_post"``: x + norm(f(x)) (Swin v2).
        norm, norm_eps: see :func:`make_norm`. dropout: of the branch. drop_path: see :class:`DropPath`.
        layer_scale: first factor of a :class:`LayerScale`, or None for none.
    """

    def __init__(
        self, width: int, *, placement: str = "post", norm: str = "layer", norm_eps: float = 1e-5,
        dropout: float = 0.0, drop_path: float = 0.0, layer_scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if placement not in PLACEMENTS:
            raise ValueError(f"unknown placement {placement!r} of the norm; use one of {list(PLACEMENTS)}")
        self.placement = placement
        self.norm = make_norm(norm, width, eps=norm_eps)
        self.out_norm = make_norm(norm, width, eps=norm_eps) if placement == "peri" else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.scale = nn.Identity() if layer_scale is None else LayerScale(width, layer_scale)
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """(B, N, C) to the same."""
        change = self.dropout(branch(self.norm(tokens) if self.placement in ("pre", "peri") else tokens))
        change = self.norm(change) if self.placement == "res_post" else self.out_norm(change)
        tokens = tokens + self.drop_path(self.scale(change))
        return self.norm(tokens) if self.placement == "post" else tokens


class GatedResidual(nn.Module):
    """``x`` and a branch ``f`` of it, mixed by gates that both of them set (D-FINE, arXiv 2410.13842, section 4.3).

    norm(g · x + g' · f(x)), one gate a channel. They start half open, whatever the tokens.

    Args:
        width: C. norm, norm_eps: see :func:`make_norm`. dropout: of the branch.
    """

    def __init__(self, width: int, *, norm: str = "layer", norm_eps: float = 1e-5, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Linear(2 * width, 2 * width)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)
        self.norm = make_norm(norm, width, eps=norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """(B, N, C) to the same."""
        change = self.dropout(branch(tokens))
        keep, take = self.gate(torch.cat([tokens, change], dim=-1)).sigmoid().chunk(2, dim=-1)
        return self.norm(keep * tokens + take * change)


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward.

    Args:
        width: C. heads: attention heads. hidden: inner width of the feed-forward.
        activation: see :class:`FeedForward`.
        placement, norm, norm_eps, drop_path, layer_scale: see :class:`Residual`.
        dropout: of attention weights, of the inner feed-forward activations and of each branch.
        bias: of all linear layers.
        attention: the self-attention; an :class:`Attention` of ``heads`` heads where not given. Any module called as
            ``attention(tokens, **context)`` will do.
    """

    def __init__(
        self, width: int, heads: int, hidden: int, *, activation: str = "gelu", placement: str = "post",
        norm: str = "layer", norm_eps: float = 1e-5, dropout: float = 0.0, drop_path: float = 0.0,
        layer_scale: float | None = None, bias: bool = True, attention: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        around: dict[str, Any] = {
            "placement": placement, "norm": norm, "norm_eps": norm_eps, "dropout": dropout, "drop_path": drop_path,
            "layer_scale": layer_scale,
        }  # fmt: skip
        self.self_attention = Attention(width, heads, bias=bias, dropout=dropout) if attention is None else attention
        self.self_attention_residual = Residual(width, **around)
        self.feed_forward = FeedForward(width, hidden, activation=activation, bias=bias, dropout=dropout)
        self.feed_forward_residual = Residual(width, **around)

    def forward(self, tokens: Tensor, **context: Any) -> Tensor:
        """(B, N, C) to (B, N, C); ``context`` goes to the attention (``query_pos``, ``mask``, ``rotary``, …)."""
        tokens = self.self_attention_residual(tokens, lambda x: self.self_attention(x, **context))
        return self.feed_forward_residual(tokens, self.feed_forward)


class DecoderBlock(nn.Module):
    """Self-attention, cross-attention to a memory, feed-forward.

    The cross-attention is injected: any module called as ``cross(tokens, memory, query_pos=…, **context)``, so that
    dense (:class:`Attention`) and deformable (:class:`DeformableAttention`) attention share this block.
    ``cross_residual`` joins it with the tokens: a :class:`Residual` like the others' where not given, or a
    :class:`GatedResidual`. ``attention`` is the self-attention, as in :class:`EncoderBlock`, whose are the other
    arguments, too.
    """

    def __init__(
        self, width: int, heads: int, hidden: int, *, cross_attention: nn.Module, activation: str = "relu",
        placement: str = "post", norm: str = "layer", norm_eps: float = 1e-5, dropout: float = 0.0, bias: bool = True,
        attention: nn.Module | None = None, cross_residual: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        around: dict[str, Any] = {"placement": placement, "norm": norm, "norm_eps": norm_eps, "dropout": dropout}
        self.self_attention = Attention(width, heads, bias=bias, dropout=dropout) if attention is None else attention
        self.self_attention_residual = Residual(width, **around)
        self.cross_attention = cross_attention
        self.cross_attention_residual = Residual(width, **around) if cross_residual is None else cross_residual
        self.feed_forward = FeedForward(width, hidden, activation=activation, bias=bias, dropout=dropout)
        self.feed_forward_residual = Residual(width, **around)

    def forward(
        self, tokens: Tensor, memory: Tensor, *, query_pos: Tensor | None = None,
        context: Mapping[str, Any] | None = None, **own: Any,
    ) -> Tensor:  # fmt: skip
        """One layer of decoding.

        Args:
            tokens: (B, Q, C). memory: (B, M, C). query_pos: (B, Q, C), added to queries and keys.
            context: what else the cross-attention takes (memory positions and mask, or reference boxes and shapes).
            own: what else the self-attention takes (``mask``, ``causal``, ``cache``, …).

        Returns:
            (B, Q, C).
        """
        tokens = self.self_attention_residual(tokens, lambda x: self.self_attention(x, query_pos=query_pos, **own))
        tokens = self.cross_attention_residual(
            tokens, lambda x: self.cross_attention(x, memory, query_pos=query_pos, **(context or {}))
        )
        return self.feed_forward_residual(tokens, self.feed_forward)
