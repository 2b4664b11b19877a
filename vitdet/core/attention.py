"""Scaled dot-product attention (arXiv 1706.03762, section 3.2): one module for self- and cross-attention.

The backend is chosen in one place, :func:`scaled_dot_product_attention`; :func:`explicit_attention` spells the same
maths out and returns the weights. A test holds them equal.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdet.core.cache import KeyValueCache
from vitdet.core.masks import causal_mask, sliding_window_mask
from vitdet.core.norms import make_qk_norm
from vitdet.core.positions import Rotation, rotate


def additive_mask(mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask (True = may attend) and an additive bias, both broadcastable to (B, H, N, M), as one term."""
    if mask is None:
        return bias if bias is None else bias.to(dtype)
    forbidden = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))
    return forbidden if bias is None else bias.to(dtype) + forbidden


def visible(
    mask: Tensor | None, queries: int, memory: int, *, causal: bool, window: int | None, device: torch.device
) -> Tensor | None:
    """The mask with the causal and the sliding-window restriction, or None where everything is seen."""
    for wanted, restriction in (
        (causal, lambda: causal_mask(queries, memory, device=device)),
        (window is not None, lambda: sliding_window_mask(queries, memory, window or 1, device=device)),
    ):
        if wanted:
            mask = restriction() if mask is None else mask & restriction()
    return mask


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None,
    causal: bool = False, window: int | None = None, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """softmax(q kᵀ / √D + bias) v through torch's fused kernels (flash, memory-efficient or plain).

    Args:
        q: (B, H, N, D). k, v: (B, H or fewer, M, D): key/value heads are shared by groups of query heads.
        mask: boolean, True = may attend, broadcastable to (B, H, N, M). A query that may see nothing gets zeros.
        bias: additive, broadcastable to (B, H, N, M).
        causal: query n sees memory up to n + M - N (the last query sees everything).
        window: query n sees only memory less than this far from n + M - N.
        dropout: probability of dropping a weight.

    Returns:
        (B, H, N, D).
    """
    causal = causal and q.shape[-2] > 1  # one query is the last and sees everything: decoding needs no mask
    if window is not None or (causal and (mask is not None or bias is not None or q.shape[-2] != k.shape[-2])):
        mask = visible(mask, q.shape[-2], k.shape[-2], causal=causal, window=window, device=q.device)
        causal = False
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and torch.is_grad_enabled() and not (causal or dropout):
        # The fused kernel's backward is slow there: 8×4 heads of 300 tokens take 32 ms, 17 ms as two matrix products.
        return explicit_attention(q, k, v, mask=mask, bias=bias)[0]
    attn_mask = mask if bias is None else additive_mask(mask, bias, q.dtype)
    grouped = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, dropout_p=dropout, is_causal=causal, enable_gqa=grouped
    )


def explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None, causal: bool = False,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same as :func:`scaled_dot_product_attention`, step by step; also returns the weights (B, H, N, M)."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    # The division by √D comes before the product: there are fewer queries' channels than scores to divide.
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (B, H, N, M)
    mask = visible(mask, q.shape[-2], k.shape[-2], causal=causal, window=window, device=q.device)
    if mask is None:
        weights = (scores if bias is None else scores + bias.to(scores.dtype)).softmax(dim=-1)
        return weights @ v, weights
    blind = ~mask.any(dim=-1, keepdim=True)  # queries that may see nothing: opened, or their softmax would be 0 / 0
    term = additive_mask(mask | blind, bias, scores.dtype)
    weights = (scores + term).softmax(dim=-1).masked_fill(blind, 0)
    return weights @ v, weights


class Attention(nn.Module):
    """Multi-head attention over (B, N, C) tokens; the memory is the tokens themselves unless another is given.

    Args:
        width: C, of queries, memory and output.
        heads: number of query heads; must divide ``width``.
        kv_heads: number of key/value heads, divides ``heads`` (fewer: grouped-query, arXiv 2305.13245; 1: multi-query).
        bias: whether the projections have a bias. key_bias: whether the keys' part of it is used (not in DINOv3 and
            Swin v2).
        out_bias: whether the last projection has a bias; as ``bias`` where not given.
        qk_norm: of each query and key head before the product, see :func:`make_qk_norm`.
        dropout: on the attention weights, in training.

    ``qkv`` holds the three projections as rows of one matrix: one product when they share an input.
    """

    def __init__(
        self, width: int, heads: int, *, kv_heads: int | None = None, bias: bool = True, key_bias: bool = True,
        out_bias: bool | None = None, qk_norm: str | None = None, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        kv_heads = kv_heads or heads
        if width % heads or heads % kv_heads:
            raise ValueError(f"heads must divide the width, kv_heads the heads; got {width=}, {heads=}, {kv_heads=}")
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.dropout, self.key_bias = dropout, key_bias
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias if out_bias is None else out_bias)
        self.q_norm, self.k_norm = make_qk_norm(qk_norm, heads, self.head_width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform for each of the three projections on its own, zero bias (torch's has all as one matrix)."""
        for weight in self.qkv.weight.split(self._sizes):
            nn.init.xavier_uniform_(weight)
        nn.init.xavier_uniform_(self.out.weight)
        for bias in (self.qkv.bias, self.out.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Rows of the query, key and value projections in ``qkv``."""
        return self.heads * self.head_width, self.kv_heads * self.head_width, self.kv_heads * self.head_width

    def _project(self, inputs: Tensor, first: int, last: int) -> list[Tensor]:
        """Projections ``first`` … ``last`` (0 query, 1 key, 2 value) of one input, each (B, its heads, N, D)."""
        sizes = self._sizes
        rows = slice(sum(sizes[:first]), sum(sizes[: last + 1]))
        bias: Tensor | None = self.qkv.bias
        if bias is not None and not self.key_bias:
            queries, keys, values = bias.split(sizes)
            bias = torch.cat([queries, torch.zeros_like(keys), values])
        joint = F.linear(inputs, self.qkv.weight[rows], None if bias is None else bias[rows])
        parts = joint.split(sizes[first : last + 1], dim=-1)
        return [part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in parts]  # (B, H, N, D)

    def project(
        self, tokens: Tensor, memory: Tensor | None, query_pos: Tensor | None, memory_pos: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as (B, H, N, D), sharing a product wherever two of them share their input."""
        query = tokens if query_pos is None else tokens + query_pos
        if memory is None and query_pos is None:
            q, k, v = self._project(tokens, 0, 2)
        elif memory is None:
            # DETR adds the position to queries and keys, never to values (arXiv 2005.12872, appendix A.3).
            q, k = self._project(query, 0, 1)
            (v,) = self._project(tokens, 2, 2)
        else:
            (q,) = self._project(query, 0, 0)
            k, v = self._project_memory(memory, memory_pos)
        return self.q_norm(q), self.k_norm(k), v

    def _project_memory(self, memory: Tensor, memory_pos: Tensor | None) -> list[Tensor]:
        """k and v of a memory, the keys with its positions."""
        if memory_pos is None:
            return self._project(memory, 1, 2)
        return [*self._project(memory + memory_pos, 1, 1), *self._project(memory, 2, 2)]

    def _with_cache(
        self, tokens: Tensor, memory: Tensor | None, query_pos: Tensor | None, memory_pos: Tensor | None,
        rotary: Rotation | None, cache: KeyValueCache | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """q, k, v: rotated, and joined with what the cache holds."""
        if memory is not None and rotary is not None:
            raise ValueError("rotary positions are for self-attention; a memory has positions of its own")
        if memory is not None and cache is not None and len(cache):
            (q,) = self._project(tokens if query_pos is None else tokens + query_pos, 0, 0)
            return self.q_norm(q), *cache.content()  # a memory does not change: its keys and values are there already
        q, k, v = self.project(tokens, memory, query_pos, memory_pos)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if cache is not None:
            k, v = cache.append(k, v)
        return q, k, v

    def forward(
        self, tokens: Tensor, memory: Tensor | None = None, *, query_pos: Tensor | None = None,
        memory_pos: Tensor | None = None, mask: Tensor | None = None, bias: Tensor | None = None, causal: bool = False,
        window: int | None = None, rotary: Rotation | None = None, cache: KeyValueCache | None = None,
        collect: list[Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend.

        Args:
            tokens: (B, N, C). memory: (B, M, C), or None for self-attention.
            query_pos: (B, N, C), added to the queries and, in self-attention, to the keys.
            memory_pos: (B, M, C), added to the keys.
            mask: True = may attend; bias: added to the scores; both broadcastable to (B, H, N, M).
            causal: no token sees a later one. window: tokens see only those less than this far away.
            rotary: rotation of queries and keys by their positions, of self-attention only.
            cache: in self-attention holds the keys and values of earlier tokens, which are seen too, and takes in the
                new ones; in cross-attention those of the memory, which is projected once.
            collect: a list that the weights (B, H, N, M) are appended to; they are then made by the explicit path,
                without dropout.

        Returns:
            (B, N, C).
        """
        q, k, v = self._with_cache(tokens, memory, query_pos, memory_pos, rotary, cache)
        if collect is None:
            mixed = scaled_dot_product_attention(
                q, k, v, mask=mask, bias=bias, causal=causal, window=window,
                dropout=self.dropout if self.training else 0.0,
            )  # fmt: skip
        else:
            mixed, weights = explicit_attention(q, k, v, mask=mask, bias=bias, causal=causal, window=window)
            collect.append(weights)
        return self.out(mixed.transpose(1, 2).flatten(2))  # (B, N, C)
