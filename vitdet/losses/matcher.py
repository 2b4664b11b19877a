"""Assigning queries to targets: one to one by the Hungarian algorithm, or several to a target by the same cost.

Sources: DETR (arXiv 2005.12872, section 3.1), the focal class cost of Deformable DETR (arXiv 2010.04159), and the cost
by quality of DEIM (github.com/Intellindust-AI-Lab/DEIM, ``change_matcher``).
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from vitdet.boxes import cxcywh_to_xyxy, iou_and_giou
from vitdet.structures import SupervisedOutput, Targets

IOU_POWER = 4  # of the cost by quality, as published
UNASSIGNABLE = 1e6  # stands for NaN and infinity, which scipy refuses; the trainer's own check reports them


class HungarianMatcher:
    """Finds each query's target.

    Args:
        class_cost, box_cost, giou_cost: weights of the three terms. alpha, gamma: of the focal class cost.
        softmax: the logits are K + 1, the last of "no object", and the class cost is minus the class's probability.

    Attributes:
        by_quality: False at first. Where it is set, a pair costs minus the score of the target's class times the IoU
            to the power of 4, whatever the weights.
    """

    def __init__(
        self, *, class_cost: float = 2.0, box_cost: float = 5.0, giou_cost: float = 2.0, alpha: float = 0.25,
        gamma: float = 2.0, softmax: bool = False,
    ) -> None:  # fmt: skip
        self.class_cost, self.box_cost, self.giou_cost = class_cost, box_cost, giou_cost
        self.alpha, self.gamma, self.softmax = alpha, gamma, softmax
        self.by_quality = False

    @torch.no_grad()
    def cost(self, logits: Tensor, boxes: Tensor, targets: Targets) -> Tensor:
        """(B, Q, K) logits and (B, Q, 4) ``cxcywh`` boxes to the cost (B, Q, T) of giving query q target t."""
        index = targets.labels[:, None].expand(-1, logits.shape[1], -1)  # (B, Q, T)
        score = self.scores(logits).gather(-1, index)
        iou, giou = iou_and_giou(cxcywh_to_xyxy(boxes.float())[:, :, None], cxcywh_to_xyxy(targets.boxes)[:, None])
        if self.by_quality:
            total = -score * iou**IOU_POWER
        else:
            box_cost = torch.cdist(boxes.float(), targets.boxes, p=1)
            total = self.class_cost * self.cost_of(score) + self.box_cost * box_cost - self.giou_cost * giou
        return total.nan_to_num(UNASSIGNABLE, UNASSIGNABLE, UNASSIGNABLE)

    def scores(self, logits: Tensor) -> Tensor:
        """(B, Q, K), the probabilities of the classes without "no object"."""
        return logits.float().softmax(-1)[..., :-1] if self.softmax else logits.float().sigmoid()

    def cost_of(self, score: Tensor) -> Tensor:
        """What the score of a target's class costs, unweighted; of the same shape."""
        if self.softmax:
            return -score
        positive = self.alpha * (1 - score) ** self.gamma * -(score + 1e-8).log()
        negative = (1 - self.alpha) * score**self.gamma * -(1 - score + 1e-8).log()
        return positive - negative

    @torch.no_grad()
    def one_to_one(self, outputs: list[SupervisedOutput], targets: Targets) -> list[Tensor]:
        """The cheapest assignment of each output on its own.

        Returns:
            For each output (B, Q) int64: the query's target, -1 for background. Of n queries and t targets of an image,
            min(n, t) are matched. All outputs share one transfer from the device and one back.
        """
        if not outputs:
            return []
        device = outputs[0].logits.device
        sizes = [output.logits.shape[1] for output in outputs]
        logits = torch.cat([output.logits for output in outputs], dim=1)
        boxes = torch.cat([output.boxes for output in outputs], dim=1)
        index = np.full(logits.shape[:2], -1, dtype=np.int64)
        if targets.labels.shape[1]:
            padding = ~targets.valid[:, None]
            costs = self.cost(logits, boxes, targets).masked_fill(padding, float("inf")).cpu().numpy()  # (B, ΣQ, T)
            # Told by the costs, so that nothing else is transferred: the first query's are finite but on padding.
            for image, count in enumerate(np.isfinite(costs[:, 0]).sum(-1).tolist()):
                start = 0
                for size in sizes:
                    query, target = linear_sum_assignment(costs[image, start : start + size, :count])
                    index[image, start + query] = target
                    start += size
        return list(torch.from_numpy(index).to(device).split(sizes, dim=1))

    @torch.no_grad()
    def one_to_many(self, output: SupervisedOutput, targets: Targets, *, count: int) -> Tensor:
        """Each target takes its ``count`` cheapest queries; a query wanted by several goes to the cheapest of them.

        Returns:
            (B, Q) int64: the query's target, -1 for background. Stays on the device.
        """
        batch, queries = output.logits.shape[:2]
        if not targets.labels.shape[1]:
            return torch.full((batch, queries), -1, device=output.logits.device)
        cost = self.cost(output.logits, output.boxes, targets)  # (B, Q, T)
        best = cost.topk(min(count, queries), dim=1, largest=False).indices  # (B, count, T)
        wanted = torch.zeros_like(cost, dtype=torch.bool).scatter(1, best, True) & targets.valid[:, None]
        lowest, target = cost.masked_fill(~wanted, float("inf")).min(-1)
        return torch.where(lowest.isfinite(), target, -1)
