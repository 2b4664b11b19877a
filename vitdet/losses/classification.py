"""Losses of the queries' classes: elementwise over sigmoid scores, or a mean over softmax ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def varifocal_loss(
    logits: Tensor, quality: Tensor, positive: Tensor, *, alpha: float = 0.75, gamma: float = 2.0
) -> Tensor:
    """Varifocal loss (arXiv 2008.13367, equation 2): positives learn their IoU, hard negatives weigh more.

    Args:
        logits: (…, K). quality: (…, K), the IoU at a positive's class and 0 elsewhere.
        positive: (…, K) bool or 0/1; at a positive's class. A positive of quality 0 has weight 0.

    Returns:
        (…, K).
    """
    probability = logits.detach().sigmoid()
    weight = alpha * probability**gamma * (1 - positive.to(logits.dtype)) + quality
    return F.binary_cross_entropy_with_logits(logits, quality, weight=weight, reduction="none")


def matchability_aware_loss(
    logits: Tensor, quality: Tensor, positive: Tensor, *, alpha: float = 1.0, gamma: float = 1.5
) -> Tensor:
    """Matchability-aware loss (DEIM, arXiv 2412.04234, section 3.3): poor matches weigh as much as good ones.

    Args:
        logits, quality, positive: as of :func:`varifocal_loss`. A positive learns its quality to the power of ``gamma``
            with weight 1, so one of quality 0 learns a score of 0.
        alpha: weight of negatives, besides their score to the power of ``gamma``.

    Returns:
        (…, K).
    """
    mask = positive.to(logits.dtype)
    weight = alpha * logits.detach().sigmoid() ** gamma * (1 - mask) + mask
    return F.binary_cross_entropy_with_logits(logits, quality**gamma, weight=weight, reduction="none")


def no_object_cross_entropy(logits: Tensor, labels: Tensor, positive: Tensor, *, no_object: float) -> Tensor:
    """Cross-entropy in which queries without a target learn "no object" (DETR, arXiv 2005.12872, section 3.1).

    Args:
        logits: (B, Q, K + 1), the last of "no object". labels: (B, Q), of the positive ones.
        positive: (B, Q) bool. no_object: what a negative one weighs, above 0; a positive one weighs 1.

    Returns:
        The weighted mean, a scalar.
    """
    wanted = torch.where(positive, labels, logits.shape[-1] - 1)
    weight = torch.where(positive, 1.0, no_object)  # (B, Q)
    losses = F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none")  # (B, Q)
    return (weight * losses).sum() / weight.sum()
