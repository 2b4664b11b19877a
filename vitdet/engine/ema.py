"""Exponential moving average of the weights, the model that is evaluated and kept."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn


def scaled_decay(decay: float, *, total_steps: int, share: float = 0.05) -> float:
    """The decay whose memory, 1 / (1 - decay) steps, is at most ``share`` of the run.

    A published 0.9999 remembers 10,000 steps: a short run would end before its average has left the start.
    """
    return min(decay, 1 - 1 / max(1.0, share * total_steps))


TensorPairs = tuple[list[Tensor], list[Tensor]]


def pair_tensors(mine: nn.Module, theirs: nn.Module) -> tuple[TensorPairs, TensorPairs]:
    """The floating-point tensors of two equal models side by side, and all others."""
    floating: TensorPairs = ([], [])
    other: TensorPairs = ([], [])
    for one, two in zip(mine.state_dict().values(), theirs.state_dict().values(), strict=True):
        pair = floating if one.is_floating_point() else other
        pair[0].append(one)
        pair[1].append(two)
    return floating, other


class ExponentialMovingAverage:
    """Keeps an averaged copy of a model.

    Args:
        model: to follow. decay: of the average, once warm.
        warmup: the decay used at update n is ``decay · (1 - exp(-n / warmup))``, as RT-DETR's.
    """

    def __init__(self, model: nn.Module, *, decay: float, warmup: int) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay, self.warmup, self.updates = decay, max(1, warmup), 0
        self._pairs: tuple[TensorPairs, TensorPairs] | None = None

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards the model, which must be the same object each time; integer buffers are copied."""
        if self._pairs is None:
            self._pairs = pair_tensors(self.model, model)
        (averaged, current), (counters, current_counters) = self._pairs
        self.updates += 1
        decay = self.decay * (1 - math.exp(-self.updates / self.warmup))
        torch._foreach_lerp_(averaged, current, 1 - decay)
        if counters:
            torch._foreach_copy_(counters, current_counters)

    def state_dict(self) -> dict:
        """For resuming."""
        return {"model": self.model.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict) -> None:
        """The inverse of :meth:`state_dict`."""
        self.model.load_state_dict(state["model"])
        self.updates = state["updates"]
