"""The Transformer of 2017 (arXiv 1706.03762): encoder, decoder, and each of the two alone.

Unlike the paper's, these projections have biases (``bias=False`` for none).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdet.core.attention import Attention
from vitdet.core.blocks import DecoderBlock, EncoderBlock
from vitdet.core.cache import KeyValueCache
from vitdet.core.decoding import beam_search, greedy_search
from vitdet.core.masks import padding_mask
from vitdet.core.norms import make_norm
from vitdet.core.positions import alibi_bias, rotary_1d, sinusoidal_1d
from vitdet.core.stacks import DecoderStack, EncoderStack

POSITIONS = ("sinusoidal", "rotary", "alibi", "none")


class TokenEmbedding(nn.Module):
    """Token vectors times √C, with their positions; the same matrix gives the logits (section 3.4 of the paper).

    Args:
        vocabulary: K. width: C. heads: of the attention that is told the positions.
        positions: ``"sinusoidal"`` are added here (section 3.5), ``"rotary"`` and ``"alibi"`` are for every
            self-attention, ``"none"`` leaves tokens without.
        dropout: of the sum, in training.
    """

    def __init__(self, vocabulary: int, width: int, *, heads: int, positions: str, dropout: float) -> None:
        super().__init__()
        if positions not in POSITIONS:
            raise ValueError(f"unknown positions {positions!r}; use one of {list(POSITIONS)}")
        self.positions, self.heads = positions, heads
        self.vectors = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.vectors.weight, std=width**-0.5)  # logits of normed outputs then have a variance of 1

    def forward(self, tokens: Tensor, *, start: int = 0) -> Tensor:
        """(B, N) tokens, of which the first stands at ``start``, to (B, N, C)."""
        vectors = self.vectors(tokens) * self.vectors.embedding_dim**0.5  # (B, N, C)
        if self.positions == "sinusoidal":
            places = sinusoidal_1d(vectors.shape[1], vectors.shape[2], start=start, device=tokens.device)
            vectors = vectors + places.to(vectors.dtype)
        return self.dropout(vectors)

    def context(self, tokens: Tensor, *, start: int = 0) -> dict[str, Any]:
        """What self-attention is told about the positions of (B, N) tokens, of which the first stands at ``start``."""
        count = tokens.shape[1]
        if self.positions == "rotary":
            width = self.vectors.embedding_dim // self.heads
            return {"rotary": rotary_1d(count, width, start=start, device=tokens.device)}
        if self.positions == "alibi":
            return {"bias": alibi_bias(self.heads, count, start + count, device=tokens.device)}
        return {}

    def logits(self, outputs: Tensor) -> Tensor:
        """(…, C) to (…, K)."""
        return F.linear(outputs, self.vectors.weight)


class CachedSteps:
    """A decoder that is told tokens bit by bit (see :class:`vitdet.core.decoding.Steps`) and computes each once.

    Args:
        decode: a model's decoding method. layers: how many it has.
        memory, mask: what its cross-attention sees; None without one.
    """

    def __init__(
        self, decode: Callable[..., Tensor], layers: int, *, memory: Tensor | None = None, mask: Tensor | None = None
    ) -> None:
        self._decode, self._memory, self._mask = decode, memory, mask
        self._own = [KeyValueCache() for _ in range(layers)]
        self._cross = [KeyValueCache() for _ in range(layers)]

    def advance(self, tokens: Tensor) -> Tensor:
        """Append (B, n) tokens; the logits (B, K) of what comes next."""
        if self._memory is None:
            return self._decode(tokens, caches=self._own)[:, -1]
        pairs = list(zip(self._own, self._cross, strict=True))
        return self._decode(tokens, self._memory, mask=self._mask, caches=pairs)[:, -1]

    def expand(self, copies: int) -> None:
        """Every sequence becomes ``copies`` neighbouring ones."""
        for cache in (*self._own, *self._cross):
            cache.repeat(copies)
        if self._memory is not None:
            self._memory = self._memory.repeat_interleave(copies, dim=0)
        if self._mask is not None:
            self._mask = self._mask.repeat_interleave(copies, dim=0)

    def reorder(self, rows: Tensor) -> None:
        """Sequence b goes on from what ``rows[b]``, a copy of the same one, was; the memory of the two is the same."""
        for cache in self._own:
            cache.reorder(rows)


class Transformer(nn.Module):
    """Encoder and decoder over one vocabulary; source, target and output share one matrix.

    Args:
        vocabulary: K, the number of tokens.
        width: C. heads, kv_heads: see :class:`Attention`. hidden: inner width of the feed-forward.
        encoder_layers, decoder_layers: blocks of each half.
        positions: see :class:`TokenEmbedding`; cross-attention has none but what the tokens carry.
        padding: the token that sources are filled up with, seen by nobody; None where all have the same length. Targets
            are filled up at their end, where causality hides it.
        dropout, activation, placement, norm, bias: see :class:`EncoderBlock`.
    """

    def __init__(
        self, vocabulary: int, *, width: int = 512, heads: int = 8, kv_heads: int | None = None, hidden: int = 2048,
        encoder_layers: int = 6, decoder_layers: int = 6, positions: str = "sinusoidal", padding: int | None = 0,
        dropout: float = 0.1, activation: str = "relu", placement: str = "post", norm: str = "layer", bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.padding = padding
        self.embedding = TokenEmbedding(vocabulary, width, heads=heads, positions=positions, dropout=dropout)

        def attention() -> Attention:
            return Attention(width, heads, kv_heads=kv_heads, bias=bias, dropout=dropout)

        options: dict[str, Any] = {
            "activation": activation, "placement": placement, "norm": norm, "dropout": dropout, "bias": bias,
        }  # fmt: skip
        self.encoder = EncoderStack(
            (EncoderBlock(width, heads, hidden, attention=attention(), **options) for _ in range(encoder_layers)),
            norm=_last_norm(placement, norm, width),
        )
        self.decoder = DecoderStack(
            (
                DecoderBlock(width, heads, hidden, attention=attention(), cross_attention=attention(), **options)
                for _ in range(decoder_layers)
            ),
            norm=_last_norm(placement, norm, width),
        )

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """(B, M) source tokens and (B, T) target tokens, a start token first, to logits (B, T, K) of those one on."""
        memory, mask = self.encode(source)
        return self.decode(target, memory, mask=mask)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor | None]:
        """(B, M) tokens to the memory (B, M, C) and the mask (B, 1, 1, M) of what is no padding."""
        mask = None if self.padding is None else padding_mask(source != self.padding)
        return self.encoder(self.embedding(source), mask=mask, **self.embedding.context(source)), mask

    def decode(
        self, target: Tensor, memory: Tensor, *, mask: Tensor | None = None,
        caches: Sequence[tuple[KeyValueCache, KeyValueCache]] | None = None,
    ) -> Tensor:  # fmt: skip
        """(B, T) tokens, which follow those in the caches (a pair a layer, see :class:`DecoderStack`), to (B, T, K)."""
        start = len(caches[0][0]) if caches else 0
        outputs = self.decoder(
            self.embedding(target, start=start), memory, context={"mask": mask}, caches=caches, causal=True,
            **self.embedding.context(target, start=start),
        )  # fmt: skip
        return self.embedding.logits(outputs)

    def greedy(self, source: Tensor, *, start: int, stop: int, length: int) -> Tensor:
        """(B, M) source tokens to (B, at most ``length``) target tokens, see :func:`greedy_search`."""
        with torch.no_grad():
            steps, prompt = self._begin(source, start)
            return greedy_search(steps, prompt, stop=stop, length=length, padding=_filling(self.padding, stop))

    def beam(
        self, source: Tensor, *, start: int, stop: int, length: int, beams: int = 4, length_penalty: float = 0.6
    ) -> Tensor:
        """(B, M) source tokens to (B, at most ``length``) target tokens, see :func:`beam_search`."""
        with torch.no_grad():
            steps, prompt = self._begin(source, start)
            return beam_search(
                steps, prompt, beams=beams, stop=stop, length=length, padding=_filling(self.padding, stop),
                length_penalty=length_penalty,
            )  # fmt: skip

    def _begin(self, source: Tensor, start: int) -> tuple[CachedSteps, Tensor]:
        """The state to decode from and the first tokens (B, 1)."""
        _refuse_training(self)
        memory, mask = self.encode(source)
        steps = CachedSteps(self.decode, len(self.decoder.layers), memory=memory, mask=mask)
        return steps, source.new_full((len(source), 1), start)


class TokenTransformer(nn.Module):
    """One half alone: causal, it is decoder-only as GPT; otherwise encoder-only as BERT (arXiv 1810.04805).

    Args:
        layers: blocks. causal: whether a token sees those before it only.
        window: how far a token sees, see :func:`sliding_window_mask`; None for all the way.
        padding: the token that sequences are filled up with at their end; None where all have the same length.
        vocabulary, width, heads, kv_heads, hidden, positions, dropout, activation, placement, norm, bias: as in
            :class:`Transformer`.
    """

    def __init__(
        self, vocabulary: int, *, causal: bool, width: int = 512, heads: int = 8, kv_heads: int | None = None,
        hidden: int = 2048, layers: int = 6, window: int | None = None, positions: str = "sinusoidal",
        padding: int | None = 0, dropout: float = 0.1, activation: str = "gelu", placement: str = "pre",
        norm: str = "layer", bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.causal, self.window, self.padding = causal, window, padding
        self.embedding = TokenEmbedding(vocabulary, width, heads=heads, positions=positions, dropout=dropout)
        blocks = (
            EncoderBlock(
                width, heads, hidden, activation=activation, placement=placement, norm=norm, dropout=dropout, bias=bias,
                attention=Attention(width, heads, kv_heads=kv_heads, bias=bias, dropout=dropout),
            )
            for _ in range(layers)
        )  # fmt: skip
        self.stack = EncoderStack(blocks, norm=_last_norm(placement, norm, width))

    def encode(self, tokens: Tensor, *, caches: Sequence[KeyValueCache] | None = None) -> Tensor:
        """(B, N) tokens, which follow those in the caches, to (B, N, C)."""
        start = len(caches[0]) if caches else 0
        # What fills up the end of a sequence is hidden by causality already.
        hidden = None if self.causal or self.padding is None else padding_mask(tokens != self.padding)
        return self.stack(
            self.embedding(tokens, start=start), caches=caches, mask=hidden, causal=self.causal, window=self.window,
            **self.embedding.context(tokens, start=start),
        )  # fmt: skip

    def forward(self, tokens: Tensor, *, caches: Sequence[KeyValueCache] | None = None) -> Tensor:
        """(B, N) tokens to logits (B, N, K): of the tokens one on where causal, of the tokens themselves otherwise."""
        return self.embedding.logits(self.encode(tokens, caches=caches))

    def greedy(self, prompt: Tensor, *, stop: int, length: int) -> Tensor:
        """Go on after (B, n) tokens, none of them padding, by (B, at most ``length``), see :func:`greedy_search`."""
        with torch.no_grad():
            padding = _filling(self.padding, stop)
            return greedy_search(self._begin(), prompt, stop=stop, length=length, padding=padding)

    def beam(self, prompt: Tensor, *, stop: int, length: int, beams: int = 4, length_penalty: float = 0.6) -> Tensor:
        """Go on after (B, n) tokens, none of them padding, by (B, at most ``length``), see :func:`beam_search`."""
        with torch.no_grad():
            return beam_search(
                self._begin(), prompt, beams=beams, stop=stop, length=length, padding=_filling(self.padding, stop),
                length_penalty=length_penalty,
            )  # fmt: skip

    def _begin(self) -> CachedSteps:
        """The state to decode from."""
        _refuse_training(self)
        if not self.causal:
            raise ValueError("only a causal model goes on after a prompt; make it with causal=True")
        return CachedSteps(self.forward, len(self.stack.layers))


def base(vocabulary: int = 37000, **options: Any) -> Transformer:
    """The paper's base model (table 3): 512 wide, 8 heads, 6 + 6 layers, 2048 inner, dropout 0.1.

    With 37,000 tokens it has 63,082,496 parameters: 18.9 M in the shared matrix, 18.9 M in the encoder, 25.2 M in the
    decoder. The paper says 65 M and "about 37000"; its rows for 2, 4 and 8 layers have the same differences as here
    (7.4 M for a pair of layers), so that its matrix had about 41,000 rows, or something else was counted.
    """
    return Transformer(vocabulary, **options)


def big(vocabulary: int = 37000, **options: Any) -> Transformer:
    """The paper's big model (table 3): 1024 wide, 16 heads, 6 + 6 layers, 4096 inner, dropout 0.3; 214 M parameters."""
    return Transformer(vocabulary, **{"width": 1024, "heads": 16, "hidden": 4096, "dropout": 0.3, **options})


def _last_norm(placement: str, norm: str, width: int) -> nn.Module | None:
    """Post-norm blocks hand on normed tokens; after all others a stack needs a norm of its own."""
    return None if placement == "post" else make_norm(norm, width)


def _filling(padding: int | None, stop: int) -> int:
    """What finished sequences are filled up with."""
    return stop if padding is None else padding


def _refuse_training(model: nn.Module) -> None:
    """Dropout would make what is decoded random."""
    if model.training:
        raise ValueError("decoding is for a model in evaluation mode; call its .eval() first")
