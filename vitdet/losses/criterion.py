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
from vitdet.errors import UserError
from vitdet.losses.classification import matchability_aware_loss, no_object_cross_entropy, varifocal_loss
from vitdet.losses.distribution import (
    decoupled_mean,
    distillation_loss,
    edge_targets,
    fine_grained_loss,
    matched_share,
)
from vitdet.losses.matcher import HungarianMatcher
from vitdet.structures import DetectorOutput, EdgeDistributions, SupervisedOutput, Targets

CLASS_LOSSES = ("vfl", "mal", "ce")


class Criterion(nn.Module):
    """Class, L1 and GIoU losses of every supervised prediction (arXiv 2005.12872, section 3.1; 2304.08069, section 4).

    Predictions with distributions of their boxes' edges get D-FINE's two terms, too (arXiv 2410.13842, section 4).

    Args:
        matcher: assigns queries to targets.
        classification: the loss of the classes, which names its term: ``vfl``, varifocal; ``mal``, matchability-aware;
            ``ce``, cross-entropy with "no object", which goes with a ``softmax`` matcher and an output that has a logit
            for it. None for ``ce`` with such a matcher, else ``vfl``.
        vfl_weight, mal_weight, ce_weight: of the loss of the classes. box_weight, giou_weight: of L1 and GIoU.
        fgl_weight, ddf_weight: of the fine-grained localisation and the distillation loss.
        alpha, gamma: of the varifocal loss. mal_alpha, mal_gamma: of the matchability-aware loss.
        no_object: what a query without a target weighs in the cross-entropy, in (0, 1].
        one_to_many: queries per target for the predictions that ask for one-to-many matching.
        dense_weight: factor on these predictions' terms.
        union: boxes and edges learn from the matches of all one-to-one predictions together (D-FINE, section 4.2), only
            the classes from those of their own prediction.
        quality_from: the epoch from which queries are matched by quality, see :class:`HungarianMatcher`, once
            :meth:`set_epoch` has told of it; None for never.

    Raises:
        ValueError: the loss of the classes is not one for the matcher's scores, or a number is out of range.
    """

    def __init__(
        self, *, matcher: HungarianMatcher, classification: str | None = None, vfl_weight: float = 1.0,
        mal_weight: float = 1.0, ce_weight: float = 1.0, box_weight: float = 5.0, giou_weight: float = 2.0,
        fgl_weight: float = 0.15, ddf_weight: float = 1.5, alpha: float = 0.75, gamma: float = 2.0,
        mal_alpha: float = 1.0, mal_gamma: float = 1.5, no_object: float = 0.1, one_to_many: int = 8,
        dense_weight: float = 1.0, union: bool = False, quality_from: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        classification = classification or ("ce" if matcher.softmax else "vfl")
        if classification not in CLASS_LOSSES:
            raise ValueError(f"classification must be one of {', '.join(CLASS_LOSSES)}, got {classification!r}")
        if matcher.softmax != (classification == "ce"):
            raise ValueError(f"a matcher with softmax={matcher.softmax} and {classification!r} do not go together")
        if not 0 < no_object <= 1:
            raise ValueError(f"no_object is a weight in (0, 1], got {no_object}")
        self.matcher, self.classification, self.union, self.quality_from = matcher, classification, union, quality_from
        self.alpha, self.gamma, self.mal_alpha, self.mal_gamma = alpha, gamma, mal_alpha, mal_gamma
        self.no_object, self.count, self.dense_weight = no_object, one_to_many, dense_weight
        class_weight = {"vfl": vfl_weight, "mal": mal_weight, "ce": ce_weight}[classification]
        self.weights = {
            classification: class_weight, "box": box_weight, "giou": giou_weight, "fgl": fgl_weight, "ddf": ddf_weight,
        }  # fmt: skip

    def set_epoch(self, epoch: int) -> None:
        """Match as is done in this epoch, the first being 0."""
        self.matcher.by_quality = self.quality_from is not None and epoch >= self.quality_from

    def forward(self, output: DetectorOutput, targets: Targets) -> dict[str, Tensor]:
        """The weighted terms, ``"{prediction}/{vfl|mal|ce|box|giou|fgl|ddf}"``, and their sum ``"total"``; scalars.

        Every term but ``ce`` and ``ddf``, which are means already, is divided by the number of targets in the batch (at
        least 1, mean over the processes), and by the copies of each target that the prediction's queries stand for;
        what learns from the union of matches by the number of queries in it.

        Raises:
            UserError: the loss of the classes is not one for this output's logits.
        """
        self.check(output)
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
                counts: dict[str, Tensor | float] = {"vfl": count, "mal": count, "ce": 1.0, "ddf": 1.0}
                for term, value in self.terms(prediction, own, boxes, share).items():
                    losses[f"{name}/{term}"] = self.weights[term] * scale * value / counts.get(term, box_count)
        losses["total"] = torch.stack(list(losses.values())).sum()
        return losses

    def check(self, output: DetectorOutput) -> None:
        """Whether output and loss of the classes agree on a logit for "no object"."""
        if output.no_object == (self.classification == "ce"):
            return
        has, verb, remedy = ("a", "leaves out", "ce") if output.no_object else ("no", "needs", "vfl or mal")
        raise UserError(
            f"the model has {has} logit for 'no object', which loss.classification={self.classification} {verb}; "
            f"set it to {remedy}"
        )

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
        """Unweighted sums over the batch, and the means of the cross-entropy and the distillation term.

        Args:
            own: what the classes learn from. boxes: what boxes and edges learn from.
            share: see :func:`matched_share`; of ``boxes`` where not given.
        """
        difference = (prediction.boxes.float() - boxes.boxes).abs()
        terms = {
            self.classification: self.class_term(prediction.logits.float(), own),
            "box": torch.where(boxes.positive[..., None], difference, 0.0).sum(),
            "giou": torch.where(boxes.positive, 1 - boxes.giou, 0.0).sum(),
        }
        if prediction.edges is not None:
            # With the union, denoising queries weigh matched and other ones as the object queries do.
            terms |= edge_terms(prediction.edges, boxes, matched_share(boxes.positive) if share is None else share)
        return terms

    def class_term(self, logits: Tensor, own: Matches) -> Tensor:
        """The loss of the classes, unweighted: a sum over the batch, or the cross-entropy's mean."""
        if self.classification == "ce":
            return no_object_cross_entropy(logits, own.labels, own.positive, no_object=self.no_object)
        chosen = torch.zeros_like(logits, dtype=torch.bool)  # (B, Q, K)
        chosen.scatter_(-1, own.labels[..., None], own.positive[..., None])
        quality = torch.where(chosen, own.iou.detach()[..., None], 0.0)
        if self.classification == "mal":
            return matchability_aware_loss(logits, quality, chosen, alpha=self.mal_alpha, gamma=self.mal_gamma).sum()
        return varifocal_loss(logits, quality, chosen, alpha=self.alpha, gamma=self.gamma).sum()


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
