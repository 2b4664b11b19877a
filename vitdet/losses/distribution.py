"""Losses on the distributions of a box's edges (D-FINE, arXiv 2410.13842, sections 4.1 and 4.2), elementwise.

An edge lies at the expected bin value under its distribution; the bins are distances from the reference box's edge.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitdet.boxes import cxcywh_to_xyxy
from vitdet.structures import EdgeDistributions


@torch.no_grad()
def edge_targets(edges: EdgeDistributions, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Where each edge's target lies among the bins: between a lower and the next one.

    Args:
        edges: of B images and Q queries. boxes: (B, Q, 4) ``cxcywh`` in [0, 1], the queries' targets.

    Returns:
        The lower bin (B, Q, 4) int64, and the share (B, Q, 4) of the next one in [0, 1]: the target's place on the way
        to it. Left, top, right, bottom edge. Beyond the last bins all of it is theirs.
    """
    bins, scale = edges.bins.float(), edges.scale.float().abs()
    centre, size = edges.reference.float().split(2, dim=-1)  # (B, Q, 2)
    low, high = cxcywh_to_xyxy(boxes).split(2, dim=-1)
    # An empty reference box gives large distances, not infinite ones.
    distance = torch.cat([centre - low, high - centre], dim=-1) / (size / scale + 1e-16).repeat(1, 1, 2)
    distance = distance - 0.5 * scale  # (B, Q, 4)
    lower = (torch.bucketize(distance, bins, right=True) - 1).clamp(0, len(bins) - 2)
    share = (distance - bins[lower]) / (bins[lower + 1] - bins[lower])
    return lower, share.clamp(0, 1)


def fine_grained_loss(logits: Tensor, lower: Tensor, share: Tensor) -> Tensor:
    """Cross-entropy with the two bins around the target, each by its share (equation 4, without its weight, the IoU).

    Args:
        logits: (B, Q, 4, N + 1). lower, share: of :func:`edge_targets`.

    Returns:
        (B, Q, 4).
    """
    logs = logits.log_softmax(-1)
    below, above = (logs.gather(-1, (lower + step)[..., None])[..., 0] for step in (0, 1))
    return -(below * (1 - share) + above * share)


def distillation_loss(logits: Tensor, teacher: Tensor, *, temperature: float = 5.0) -> Tensor:
    """Divergence of the teacher's softened distributions from these (equation 6, without its weight).

    Args:
        logits, teacher: (B, Q, 4, N + 1); the teacher gets no gradient.
        temperature: both are divided by it; its square makes up for the smaller gradient.

    Returns:
        (B, Q, 4): KL(teacher ‖ these) · temperature².
    """
    ours, theirs = (logits / temperature).log_softmax(-1), (teacher.detach() / temperature).log_softmax(-1)
    return temperature**2 * F.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1)


def matched_share(positive: Tensor) -> Tensor:
    """√n₊ / (√n₊ + √n₋) of a (B, Q) mask, a scalar: the weight of the matched queries' mean in the distillation."""
    matched = positive.sum().float().sqrt()
    return matched / (matched + (~positive).sum().float().sqrt()).clamp(min=1)


def decoupled_mean(values: Tensor, positive: Tensor, share: Tensor) -> Tensor:
    """The mean over matched queries and that over the others, weighed by ``share`` and the rest of 1; a scalar.

    Args:
        values: (B, Q, 4). positive: (B, Q) bool. share: see :func:`matched_share`.
    """
    mask = positive[..., None].expand_as(values)
    matched = torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)
    others = torch.where(mask, 0.0, values).sum() / (~mask).sum().clamp(min=1)
    return share * matched + (1 - share) * others
