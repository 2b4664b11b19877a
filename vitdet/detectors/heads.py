"""Small pieces that detectors share: the logit arithmetic of boxes, the start of the heads, checks of arguments."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitdet.core.feedforward import MLP


def at_least(least: int, **values: float) -> None:
    """Refuse any of the named values that is no number or below ``least``; an int asks for whole ones above 0."""
    for name, value in values.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or (least and not isinstance(value, int)):
            raise ValueError(f"{name} must be a {'whole ' if least else ''}number, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def at_most_built(**counts: int) -> None:
    """Refuse more of anything than any model has: a file's header may ask for any number."""
    for name, value in counts.items():
        if value > 64:
            raise ValueError(f"{name} is {value}, and at most 64 are built")


def inverse_sigmoid(values: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Logit of values in [0, 1], kept ``eps`` away from both ends."""
    values = values.clamp(0, 1)
    return torch.log(values.clamp(min=eps) / (1 - values).clamp(min=eps))


def make_score_head(width: int, num_classes: int, *, prior: float = 0.01) -> nn.Linear:
    """A linear classifier that starts by giving every class the probability ``prior`` (arXiv 1708.02002, 3.3)."""
    head = nn.Linear(width, num_classes)
    nn.init.xavier_uniform_(head.weight)
    nn.init.constant_(head.bias, -math.log((1 - prior) / prior))
    return head


def make_box_head(width: int, *, outputs: int = 4, activation: str = "relu") -> MLP:
    """Three layers to box logits, which start at 0: the first prediction is the reference box itself."""
    head = MLP(width, width, outputs, layers=3, activation=activation)
    for parameter in head.layers[-1].parameters():
        nn.init.zeros_(parameter)
    return head


def choose_backbone(given: nn.Module | None, published: Callable[..., nn.Module], **options: bool) -> nn.Module:
    """The given backbone, or else the published one with these options.

    Raises:
        ValueError: both a backbone and an option, which is the published one's only.
    """
    if given is None:
        return published(**options)
    for name, value in options.items():
        if value:
            raise ValueError(f"{name} is an argument of the published backbone, not of the one given; leave one out")
    return given
