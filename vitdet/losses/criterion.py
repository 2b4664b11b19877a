"""The detectors' criterion: one loop over an output's named predictions, which knows no model.

Every term is computed for all queries and masked, so that the shapes, and with them the autograd graph, are the same
whatever the targets. All of it is computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitdet.boxes import cxcywh_to_xyxy, iou_and_giou
from vitdet.distributed import mean_over_ranks
from vitdet.losses.classification import varifocal_loss
from vitdet.losses.matcher import HungarianMatcher
from vitdet.structures import DetectorOutput, SupervisedOutput, Targets


class Criterion(nn.Module):
    """Varifocal, L1 and GIoU losses of every supervised prediction (arXiv 2304.08069, section 4 and appendix).

    Args:
        matcher: assigns queries to targets.
        vfl_weight, box_weight, giou_weight: of the three terms.
        alpha, gamma: of the varifocal loss.
        one_to_many: queries per target for the predictions that ask for one-to-many matching.
        dense_weight: factor on these predictions' terms.
    """

    def __init__(
        self, *, matcher: HungarianMatcher, vfl_weight: float = 1.0, box_weight: float = 5.0, giou_weight: float = 2.0,
        alpha: float = 0.75, gamma: float = 2.0, one_to_many: int = 8, dense_weight: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.matcher, self.alpha, self.gamma = matcher, alpha, gamma
        self.weights = {"vfl": vfl_weight, "box": box_weight, "giou": giou_weight}
        self.count, self.dense_weight = one_to_many, dense_weight

    def forward(self, output: DetectorOutput, targets: Targets) -> dict[str, Tensor]:
        """The weighted terms, ``"{prediction}/{vfl|box|giou}"``, and their sum ``"total"``; scalars.

        Every term is divided by the number of targets in the batch (at least 1, mean over the processes), and by the
        copies of each target that the prediction's queries stand for.
        """
        num_boxes = mean_over_ranks(targets.valid.sum().float()).clamp(min=1)
        assigned = self.assign(output.supervised, targets)
        losses: dict[str, Tensor] = {}
        with torch.autocast(output.logits.device.type, enabled=False):
            for name, prediction in output.supervised.items():
                dense = prediction.matching == "one_to_many"
                normaliser = num_boxes * (self.count if dense else prediction.groups)
                scale = self.dense_weight if dense else 1.0
                for term, value in self.terms(prediction, assigned[name], targets).items():
                    losses[f"{name}/{term}"] = self.weights[term] * scale * value / normaliser
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

    def terms(self, prediction: SupervisedOutput, target_index: Tensor, targets: Targets) -> dict[str, Tensor]:
        """Unweighted sums over the batch of the three terms."""
        logits, boxes = prediction.logits.float(), prediction.boxes.float()
        positive = target_index >= 0  # (B, Q)
        labels, target_boxes = gather_targets(targets, target_index)
        iou, giou = iou_and_giou(cxcywh_to_xyxy(boxes), cxcywh_to_xyxy(target_boxes))  # (B, Q)
        chosen = torch.zeros_like(logits, dtype=torch.bool)  # (B, Q, K)
        chosen.scatter_(-1, labels[..., None], positive[..., None])
        quality = torch.where(chosen, iou.detach()[..., None], 0.0)
        vfl = varifocal_loss(logits, quality, chosen, alpha=self.alpha, gamma=self.gamma)
        return {
            "vfl": vfl.sum(),
            "box": torch.where(positive[..., None], (boxes - target_boxes).abs(), 0.0).sum(),
            "giou": torch.where(positive, 1 - giou, 0.0).sum(),
        }


def gather_targets(targets: Targets, target_index: Tensor) -> tuple[Tensor, Tensor]:
    """Labels (B, Q) and boxes (B, Q, 4) of each query's target; for background any finite values."""
    if targets.labels.shape[1] == 0:
        return torch.zeros_like(target_index), target_index.new_zeros((*target_index.shape, 4), dtype=torch.float32)
    index = target_index.clamp(min=0)
    return targets.labels.gather(1, index), targets.boxes.gather(1, index[..., None].expand(-1, -1, 4))
