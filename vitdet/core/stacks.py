"""Stacks of blocks with a final norm: the encoder and the decoder that every Transformer here is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from vitdet.core.cache import KeyValueCache


def drop_path_rates(rate: float, layers: int) -> list[float]:
    """Stochastic depth's rate for each layer, from 0 in the first to ``rate`` in the last (arXiv 1603.09382, eq. 4)."""
    return [rate * index / max(layers - 1, 1) for index in range(layers)]


def run_with_taps(
    blocks: nn.ModuleList, tokens: Tensor, layers: Sequence[int], *, norm: nn.Module,
    step: Callable[[nn.Module, Tensor], Tensor],
) -> list[Tensor]:  # fmt: skip
    """Run ``tokens = step(block, tokens)`` as far as needed; what comes out of some layers, normed, in their order."""
    wanted = [range(len(blocks))[layer] for layer in layers]
    found: dict[int, Tensor] = {}
    for index, block in enumerate(blocks[: max(wanted) + 1]):
        tokens = step(block, tokens)
        if index in wanted:
            found[index] = norm(tokens)
    return [found[index] for index in wanted]


class EncoderStack(nn.Module):
    """Blocks one after another, then a norm; causal, it is also a decoder without cross-attention.

    Args:
        blocks: called as ``block(tokens, **context)``. norm: of the result; none for post-norm blocks.
    """

    def __init__(self, blocks: Iterable[nn.Module], *, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.Identity() if norm is None else norm

    def forward(self, tokens: Tensor, *, caches: Sequence[KeyValueCache] | None = None, **context: Any) -> Tensor:
        """(B, N, C) to (B, N, C); one cache a layer where given; ``context`` goes to every block."""
        for index, block in enumerate(self.layers):
            own = context if caches is None else {**context, "cache": caches[index]}
            tokens = block(tokens, **own)
        return self.norm(tokens)

    def taps(self, tokens: Tensor, layers: Sequence[int], **context: Any) -> list[Tensor]:
        """What comes out of some layers (0 is the first, -1 the last), each normed, in the order of ``layers``."""
        return run_with_taps(self.layers, tokens, layers, norm=self.norm, step=lambda block, x: block(x, **context))


class DecoderStack(nn.Module):
    """Blocks with cross-attention one after another, then a norm.

    Args:
        blocks: called as :class:`DecoderBlock`. norm: of the result; none for post-norm blocks.
    """

    def __init__(self, blocks: Iterable[nn.Module], *, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.Identity() if norm is None else norm

    def forward(
        self, tokens: Tensor, memory: Tensor, *, context: Mapping[str, Any] | None = None,
        caches: Sequence[tuple[KeyValueCache, KeyValueCache]] | None = None, **own: Any,
    ) -> Tensor:  # fmt: skip
        """(B, Q, C) and a memory (B, M, C) to (B, Q, C).

        Args:
            context: for every cross-attention. own: for every block, see :class:`DecoderBlock`.
            caches: a pair a layer, of its self-attention and of its cross-attention.
        """
        context = dict(context or {})
        for index, block in enumerate(self.layers):
            if caches is None:
                tokens = block(tokens, memory, context=context, **own)
            else:
                mine, theirs = caches[index]
                tokens = block(tokens, memory, context={**context, "cache": theirs}, cache=mine, **own)
        return self.norm(tokens)

    def taps(
        self, tokens: Tensor, memory: Tensor, layers: Sequence[int], *, context: Mapping[str, Any] | None = None,
        **own: Any,
    ) -> list[Tensor]:  # fmt: skip
        """What comes out of some layers, see :meth:`EncoderStack.taps`; other arguments as for :meth:`forward`."""

        def step(block: nn.Module, x: Tensor) -> Tensor:
            return block(x, memory, context=context, **own)

        return run_with_taps(self.layers, tokens, layers, norm=self.norm, step=step)
