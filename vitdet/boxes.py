"""The only box arithmetic: conversions, IoU and GIoU, pairwise and elementwise.

Boxes are ``(..., 4)`` tensors, ``xyxy`` (corners) or ``cxcywh`` (centre and size), in any consistent unit.
Nothing here asserts on values: an assertion on a device tensor would make the training step wait for it, and a NaN is
caught where the loss is checked.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cxcywh_to_xyxy(boxes: Tensor) -> Tensor:
    """Centre and size to corners; shape ``(..., 4)`` is kept."""
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat([centre - half, centre + half], dim=-1)


def xyxy_to_cxcywh(boxes: Tensor) -> Tensor:
    """Corners to centre and size; shape ``(..., 4)`` is kept."""
    low, high = boxes[..., :2], boxes[..., 2:]
    return torch.cat([(low + high) / 2, high - low], dim=-1)


def xyxy_to_xywh(boxes: Tensor) -> Tensor:
    """Corners to COCO's top-left corner and size; shape ``(..., 4)`` is kept."""
    return torch.cat([boxes[..., :2], boxes[..., 2:] - boxes[..., :2]], dim=-1)


def area(boxes_xyxy: Tensor) -> Tensor:
    """``(..., 4)`` corners to ``(...)`` areas."""
    width, height = (boxes_xyxy[..., 2:] - boxes_xyxy[..., :2]).unbind(-1)
    return width * height


def iou_and_giou(boxes_a: Tensor, boxes_b: Tensor) -> tuple[Tensor, Tensor]:
    """IoU and generalised IoU of ``xyxy`` boxes, elementwise over broadcast leading dimensions.

    ``boxes_a[:, None], boxes_b[None]`` gives the pairwise matrices. Pairs of empty boxes have IoU 0 rather than NaN.
    Source: GIoU, arXiv 1902.09630, algorithm 1.
    """
    inner_low = torch.maximum(boxes_a[..., :2], boxes_b[..., :2])
    inner_high = torch.minimum(boxes_a[..., 2:], boxes_b[..., 2:])
    outer_low = torch.minimum(boxes_a[..., :2], boxes_b[..., :2])
    outer_high = torch.maximum(boxes_a[..., 2:], boxes_b[..., 2:])
    intersection = (inner_high - inner_low).clamp(min=0).prod(-1)
    hull = (outer_high - outer_low).prod(-1)
    union = area(boxes_a) + area(boxes_b) - intersection
    # 0 / 1 where a pair is empty: exactly 0 with finite gradients, which 0 / tiny does not have.
    one = torch.ones_like(union)
    iou = intersection / torch.where(union > 0, union, one)
    return iou, iou - (hull - union) / torch.where(hull > 0, hull, one)


def pairwise_iou(boxes_a: Tensor, boxes_b: Tensor) -> Tensor:
    """IoU of every box in ``(..., N, 4)`` with every box in ``(..., M, 4)``: ``(..., N, M)``; ``xyxy``."""
    return iou_and_giou(boxes_a[..., :, None, :], boxes_b[..., None, :, :])[0]
