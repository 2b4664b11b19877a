"""Classification losses over sigmoid scores, elementwise."""

from __future__ import annotations

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
