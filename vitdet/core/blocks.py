"""Encoder and decoder blocks: residual branches of attention and feed-forward around a norm.

``norm_first`` is the one difference between the 2017 paper's and DETR's ``post`` placement and ViT's ``pre``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from vitdet.core.attention import Attention
from vitdet.core.feedforward import FeedForward
from vitdet.core.norms import make_norm


def residual(tokens: Tensor, norm: nn.Module, branch: Callable[[Tensor], Tensor], *, norm_first: bool) -> Tensor:
    """``x + f(norm(x))`` (pre) or ``norm(x + f(x))`` (post)."""
    if norm_first:
        return tokens + branch(norm(tokens))
    return norm(tokens + branch(tokens))


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward.

    Args:
        width: C. heads: attention heads. hidden: inner width of the feed-forward.
        activation: see :class:`FeedForward`. norm: see :func:`make_norm`. norm_first: pre- instead of post-norm.
        dropout: of attention weights, of the inner feed-forward activations and of each branch.
    """

    def __init__(
        self, width: int, heads: int, hidden: int, *, activation: str = "gelu", norm: str = "layer",
        norm_first: bool = False, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm_first = norm_first
        self.self_attention = Attention(width, heads, dropout=dropout)
        self.self_attention_norm = make_norm(norm, width)
        self.feed_forward = FeedForward(width, hidden, activation=activation, dropout=dropout)
        self.feed_forward_norm = make_norm(norm, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, *, pos: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """(B, N, C) to (B, N, C); ``pos`` (B, N, C) is added to queries and keys; ``mask``: True = may attend."""

        def attend(x: Tensor) -> Tensor:
            return self.dropout(self.self_attention(x, query_pos=pos, mask=mask))

        tokens = residual(tokens, self.self_attention_norm, attend, norm_first=self.norm_first)
        return residual(
            tokens, self.feed_forward_norm, lambda x: self.dropout(self.feed_forward(x)), norm_first=self.norm_first
        )


class DecoderBlock(nn.Module):
    """Self-attention, cross-attention to a memory, feed-forward.

    The cross-attention is injected: any module called as ``cross(tokens, memory, query_pos=…, **context)``, so that
    dense (:class:`Attention`) and deformable (:class:`DeformableAttention`) attention share this block.
    The other arguments are those of :class:`EncoderBlock`.
    """

    def __init__(
        self, width: int, heads: int, hidden: int, *, cross_attention: nn.Module, activation: str = "relu",
        norm: str = "layer", norm_first: bool = False, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm_first = norm_first
        self.self_attention = Attention(width, heads, dropout=dropout)
        self.self_attention_norm = make_norm(norm, width)
        self.cross_attention = cross_attention
        self.cross_attention_norm = make_norm(norm, width)
        self.feed_forward = FeedForward(width, hidden, activation=activation, dropout=dropout)
        self.feed_forward_norm = make_norm(norm, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, tokens: Tensor, memory: Tensor, *, query_pos: Tensor | None = None, mask: Tensor | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> Tensor:  # fmt: skip
        """One layer of decoding.

        Args:
            tokens: (B, Q, C). memory: (B, M, C). query_pos: (B, Q, C), added to queries and keys.
            mask: for the self-attention, True = may attend.
            context: what else the cross-attention takes (memory positions and mask, or reference boxes and shapes).

        Returns:
            (B, Q, C).
        """
        context = context or {}

        def attend(x: Tensor) -> Tensor:
            return self.dropout(self.self_attention(x, query_pos=query_pos, mask=mask))

        def look(x: Tensor) -> Tensor:
            return self.dropout(self.cross_attention(x, memory, query_pos=query_pos, **context))

        tokens = residual(tokens, self.self_attention_norm, attend, norm_first=self.norm_first)
        tokens = residual(tokens, self.cross_attention_norm, look, norm_first=self.norm_first)
        return residual(
            tokens, self.feed_forward_norm, lambda x: self.dropout(self.feed_forward(x)), norm_first=self.norm_first
        )
