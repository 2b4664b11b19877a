"""Keys and values of tokens seen before, so that decoding projects each token once."""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueCache:
    """One attention's keys and values, (B, H, M, D) each; passed to it as an argument, empty at first.

    The memory grows by doubling, so that appending one token at a time copies each a bounded number of times.
    """

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._length = 0

    def __len__(self) -> int:
        """M, the number of tokens it holds."""
        return self._length

    def content(self) -> tuple[Tensor, Tensor]:
        """All keys and values so far."""
        if self._keys is None or self._values is None:
            raise ValueError("the cache is empty; append to it first")
        return self._keys[:, :, : self._length], self._values[:, :, : self._length]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take in (B, H, n, D) new ones and return all (B, H, M + n, D)."""
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise ValueError("a cache is for decoding without gradients; use torch.no_grad()")
        total = self._length + keys.shape[2]
        self._keys = _room(self._keys, keys, self._length, total)
        self._values = _room(self._values, values, self._length, total)
        self._keys[:, :, self._length : total] = keys
        self._values[:, :, self._length : total] = values
        self._length = total
        return self.content()

    def reorder(self, rows: Tensor) -> None:
        """Row b of the batch becomes what row ``rows[b]`` was: beam search keeps the best beams."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[rows], self._values[rows]

    def repeat(self, copies: int) -> None:
        """Every row of the batch becomes ``copies`` neighbouring ones."""
        if self._keys is not None:
            self.reorder(torch.arange(len(self._keys), device=self._keys.device).repeat_interleave(copies))


def _room(held: Tensor | None, new: Tensor, length: int, total: int) -> Tensor:
    """``held`` if it has room for ``total`` tokens, else a larger copy."""
    if held is not None and held.shape[2] >= total:
        return held
    batch, heads, _, width = new.shape
    larger = new.new_empty(batch, heads, total if held is None else 2 * total, width)
    if held is not None:
        larger[:, :, :length] = held[:, :, :length]
    return larger
