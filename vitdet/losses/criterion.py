"""The detectors' criterion: one loop over an output's named predictions, which knows no model.

Every term is computed for all queries and masked, so that the shapes, and with them the autograd graph, are the same
whatever the targets. All of it is computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitdet.boxes import cxcywh_to_xyxy, iou_and_giou
from vitdet.distributed import mean_over_ranks
from vitdet.losses.classification import varifocal_loss
from vitdet.losses.distribution import (
    decoupled_mean,
    distillation_loss,
    edge_targets,
    fine_grained_loss,
    matched_share,
)
from vitdet.losses.matcher import HungarianMatcher
from vitdet.structures import DetectorOutput, EdgeDistributions, SupervisedOutput, Targets


class Criterion(nn.Module):
    """Varifocal, L1 and GIoU losses of every supervised prediction (arXiv 2304.08069, section 4 and appendix).

    Predictions with distributions of their boxes' edges get D-FINE's two terms, too (arXiv 2410.13842, section 4).

    Args:
        matcher: assigns queries to targets.
        vfl_weight, box_weight, giou_weight: of the three terms.
        fgl_weight, ddf_weight: of the fine-grained localisation and the distillation loss.
        alpha, gamma: of the varifocal loss.
        one_to_many: queries per target for the predictions that ask for one-to-many matching.
        dense_weight: factor on these predictions' terms.
        union: boxes and edges learn from the matches of all one-to-one predictions together (D-FINE, section 4.2), only
            the classes from those of their own prediction.
    """

    def __init__(
        self, *, matcher: HungarianMatcher, vfl_weight: float = 1.0, box_weight: float = 5.0, giou_weight: float = 2.0,
        fgl_weight: float = 0.15, ddf_weight: float = 1.5, alpha: float = 0.75, gamma: float = 2.0,
        one_to_many: int = 8, dense_weight: float = 1.0, union: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.matcher, self.alpha, self.gamma, self.union = matcher, alpha, gamma, union
        self.weights = {
            "vfl": vfl_weight, "box": box_weight, "giou": giou_weight, "fgl": fgl_weight, "ddf": ddf_weight,
        }  # fmt: skip
        self.count, self.dense_weight = one_to_many, dense_weight

    def forward(self, output: DetectorOutput, targets: Targets) -> dict[str, Tensor]:
        """The weighted terms, ``"{prediction}/{vfl|box|giou|fgl|ddf}"``, and their sum ``"total"``; scalars.

        Every term but ``ddf``, a mean already, is divided by the number of targets in the batch (at least 1, mean over
        the processes), and by the copies of each target that the prediction's queries stand for; what learns from the
        union of matches by the number of queries in it.
        """
        num_boxes = mean_over_ranks(targets.valid.sum().float()).clamp(min=1)
        assigned = self.assign(output.supervised, targets)
        together, num_together, share = None, num_boxes, None
        if self.union:
            together = unite(output.supervised, assigned, targets)
            num_together = mean_over_ranks((together >= 0).sum().float()).clamp(min=1)
            share = matched_share(together >= 0)
        losses: dict[str, Tensor] = {}
        with torch.autocast(output.logits.device.type, enabled=False):
            for name, prediction in output.supervised.items():
                dense = prediction.matching == "one_to_many"
                scale = self.dense_weight if dense else 1.0
                count = box_count = num_boxes * (self.count if dense else prediction.groups)
                own = boxes = Matches.of(prediction, assigned[name], targets)
                if together is not None and prediction.matching == "one_to_one":
                    boxes, box_count = Matches.of(prediction, together, targets), num_together
                counts = {"vfl": count, "ddf": 1.0}
                for term, value in self.terms(prediction, own, boxes, share).items():
                    losses[f"{name}/{term}"] = self.weights[term] * scale * value / counts.get(term, box_count)
        losses["total"] = torch.stack(list(losses.values())).sum()
        return losses

    def assign(self, supervised: dict[str, SupervisedOutput], targets: Targets) -> dict[str, Tensor]:
        """Each prediction's (B, Q) target indices, -1 for background."""
        assigned: dict[str, Tensor] = {}
        hungarian = [name for name, one in supervised.items() if one.matching == "one_to_one"]
        matched = self.matcher.one_to_one([supervised[name] for name in hungarian], targets)
        assigned.update(zip(hungarian, matched, strict=True))
        for name, one in supervised.items():
            if one.matching == "one_to_many":
                assigned[name] = self.matcher.one_to_many(one, targets, count=self.count)
            elif one.matching == "given":
                if one.target_index is None:
                    raise ValueError(f"prediction {name!r} has given matching but no target_index")
                assigned[name] = one.target_index
        return assigned

    def terms(
        self, prediction: SupervisedOutput, own: Matches, boxes: Matches, share: Tensor | None
    ) -> dict[str, Tensor]:
        """Unweighted sums over the batch, and the distillation term's mean.

        Args:
            own: what the classes learn from. boxes: what boxes and edges learn from.
            share: see :func:`matched_share`; of ``boxes`` where not given.
        """
        logits = prediction.logits.float()
        chosen = torch.zeros_like(logits, dtype=torch.bool)  # (B, Q, K)
        chosen.scatter_(-1, own.labels[..., None], own.positive[..., None])
        quality = torch.where(chosen, own.iou.detach()[..., None], 0.0)
        vfl = varifocal_loss(logits, quality, chosen, alpha=self.alpha, gamma=self.gamma)
        difference = (prediction.boxes.float() - boxes.boxes).abs()
        terms = {
            "vfl": vfl.sum(),
            "box": torch.where(boxes.positive[..., None], difference, 0.0).sum(),
            "giou": torch.where(boxes.positive, 1 - boxes.giou, 0.0).sum(),
        }
        if prediction.edges is not None:
            # Denoising queries weigh matched and other ones as the object queries do.
            terms |= edge_terms(prediction.edges, boxes, matched_share(boxes.positive) if share is None else share)
        return terms


def edge_terms(edges: EdgeDistributions, matches: Matches, share: Tensor) -> dict[str, Tensor]:
    """Unweighted sum of the fine-grained loss, and where there is a teacher the mean of the distillation loss."""
    iou = torch.where(matches.positive, matches.iou.detach(), 0.0)  # (B, Q)
    logits = edges.logits.float()  # (B, Q, 4, N + 1)
    lower, upper_share = edge_targets(edges, matches.boxes)
    terms = {"fgl": (iou[..., None] * fine_grained_loss(logits, lower, upper_share)).sum()}
    if edges.teacher is not None and edges.confidence is not None:
        weight = torch.where(matches.positive, iou, edges.confidence.detach().float())
        divergence = weight[..., None] * distillation_loss(logits, edges.teacher.float())  # (B, Q, 4)
        terms["ddf"] = decoupled_mean(divergence, matches.positive, share)
    return terms


@dataclass
class Matches:
    """A prediction's queries beside their targets.

    Attributes:
        positive: (B, Q) bool, whether the query has one. labels: (B, Q). boxes: (B, Q, 4) ``cxcywh``, the targets'.
        iou, giou: (B, Q), of prediction and target. All but ``positive`` are any finite values for background.
    """

    positive: Tensor
    labels: Tensor
    boxes: Tensor
    iou: Tensor
    giou: Tensor

    @classmethod
    def of(cls, prediction: SupervisedOutput, target_index: Tensor, targets: Targets) -> Matches:
        """Of the (B, Q) target indices, -1 for background."""
        labels, boxes = gather_targets(targets, target_index)
        iou, giou = iou_and_giou(cxcywh_to_xyxy(prediction.boxes.float()), cxcywh_to_xyxy(boxes))
        return cls(target_index >= 0, labels, boxes, iou, giou)


def unite(supervised: dict[str, SupervisedOutput], assigned: dict[str, Tensor], targets: Targets) -> Tensor:
    """The matches of all one-to-one predictions together, whose queries are the same ones.

    Returns:
        (B, Q) int64: the target that most predictions give the query, -1 where none gives it one. Unlike in a single
        prediction, a target may have several queries. Stays on the device.
    """
    numbers = torch.arange(-1, targets.labels.shape[1], device=targets.labels.device)  # (1 + T,)
    indices = [assigned[name] for name, one in supervised.items() if one.matching == "one_to_one"]
    votes = torch.stack([index[..., None] == numbers for index in indices]).sum(0)  # (B, Q, 1 + T)
    votes[..., 0] = 0
    most, place = votes.max(-1)
    return torch.where(most > 0, place - 1, -1)


def gather_targets(targets: Targets, target_index: Tensor) -> tuple[Tensor, Tensor]:
    """Labels (B, Q) and boxes (B, Q, 4) of each query's target; for background any finite values."""
    if targets.labels.shape[1] == 0:
        return torch.zeros_like(target_index), target_index.new_zeros((*target_index.shape, 4), dtype=torch.float32)
    index = target_index.clamp(min=0)
    return targets.labels.gather(1, index), targets.boxes.gather(1, index[..., None].expand(-1, -1, 4))
