"""Contrastive denoising (DINO, arXiv 2203.03605, section 3.3): the decoder learns to restore spoilt ground truth.

Each group holds two copies of every target. The positive copy is moved little and must find its target; the negative
one is moved further and must call itself background. The autograd graph never depends on whether there are targets: a
batch without objects gets one padded, purely negative target an image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitdet.boxes import cxcywh_to_xyxy, xyxy_to_cxcywh
from vitdet.core.masks import group_mask
from vitdet.detectors.heads import inverse_sigmoid
from vitdet.structures import Targets


@dataclass
class DenoisingQueries:
    """Queries to put before the object queries.

    Attributes:
        tokens: (B, D, C). box_logits: (B, D, 4). groups: copies of each target.
        target_index: (B, D), each query's target, -1 for negatives and padding.
    """

    tokens: Tensor
    box_logits: Tensor
    target_index: Tensor
    groups: int

    def attention_mask(self, object_queries: int) -> Tensor:
        """(D + Q, D + Q), True = may attend: groups see themselves and the objects', which see only themselves."""
        total = self.target_index.shape[1]
        group = torch.arange(total, device=self.tokens.device) // (total // self.groups)
        objects = torch.full((object_queries,), self.groups, device=group.device)
        return group_mask(torch.cat([group, objects]), shared_group=self.groups)


class Denoising(nn.Module):
    """Makes denoising queries from targets.

    Args:
        width: C. num_classes: K. queries: positive queries an image, about: there are max(1, queries // T) groups.
        label_noise: half of it is the probability that a query's label is replaced by a random one.
        box_noise: corners move by up to this times half the box's size; negatives by up to twice that.
    """

    def __init__(
        self, width: int, *, num_classes: int, queries: int = 100, label_noise: float = 0.5, box_noise: float = 1.0
    ) -> None:
        super().__init__()
        self.num_classes, self.queries = num_classes, queries
        self.label_noise, self.box_noise = label_noise, box_noise
        self.embedding = nn.Embedding(num_classes + 1, width, padding_idx=num_classes)
        nn.init.normal_(self.embedding.weight[:-1])

    def forward(self, targets: Targets) -> DenoisingQueries:
        """Targets of B images to D = 2 · groups · max(T, 1) queries."""
        boxes, labels, valid = targets.boxes, targets.labels, targets.valid
        if labels.shape[1] == 0:
            boxes, labels = boxes.new_zeros(len(labels), 1, 4), labels.new_zeros(len(labels), 1)
            valid = torch.zeros_like(labels, dtype=torch.bool)
        most = labels.shape[1]
        groups = max(1, self.queries // most)
        copies = 2 * groups
        negative = torch.arange(copies, device=labels.device).repeat_interleave(most) % 2 == 1  # (D,)
        labels, valid, boxes = labels.tile(1, copies), valid.tile(1, copies), boxes.tile(1, copies, 1)  # (B, D), …, 4
        own = torch.arange(most, device=labels.device).tile(copies).expand_as(labels)
        target_index = torch.where(valid & ~negative, own, -1)
        tokens = self.embedding(torch.where(valid, self._spoil_labels(labels), self.num_classes))
        return DenoisingQueries(tokens, inverse_sigmoid(self._spoil_boxes(boxes, negative)), target_index, groups)

    def _spoil_labels(self, labels: Tensor) -> Tensor:
        """Some labels become random ones."""
        chosen = torch.rand(labels.shape, device=labels.device) < self.label_noise / 2
        return torch.where(chosen, torch.randint_like(labels, self.num_classes), labels)

    def _spoil_boxes(self, boxes: Tensor, negative: Tensor) -> Tensor:
        """Each corner coordinate moves by u · noise · size / 2, u in [0, 1) for positives and [1, 2) for negatives."""
        sign = torch.randint_like(boxes, 2) * 2 - 1
        amount = torch.rand_like(boxes) + negative[:, None]
        reach = boxes[..., 2:].repeat(1, 1, 2) / 2 * self.box_noise
        corners = (cxcywh_to_xyxy(boxes) + sign * amount * reach).clamp(0, 1)
        return xyxy_to_cxcywh(corners)
