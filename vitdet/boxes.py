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
    x0, y0, x1, y1 = boxes_xyxy.unbind(-1)
    return (x1 - x0) * (y1 - y0)


def iou_and_giou(boxes_a: Tensor, boxes_b: Tensor) -> tuple[Tensor, Tensor]:
    """IoU and generalised IoU of ``xyxy`` boxes, elementwise over broadcast leading dimensions.

    ``boxes_a[:, None], boxes_b[None]`` gives the pairwise matrices. Pairs of empty boxes have IoU 0 rather than NaN.
    Source: GIoU, arXiv 1902.09630, algorithm 1.
    """
    # Coordinate by coordinate: a trailing dimension of 2 or 4 would keep the broadcast products from being vectorised.
    ax0, ay0, ax1, ay1 = boxes_a.unbind(-1)
    bx0, by0, bx1, by1 = boxes_b.unbind(-1)
    width = (torch.minimum(ax1, bx1) - torch.maximum(ax0, bx0)).clamp(min=0)
    height = (torch.minimum(ay1, by1) - torch.maximum(ay0, by0)).clamp(min=0)
    intersection = width * height
    hull = (torch.maximum(ax1, bx1) - torch.minimum(ax0, bx0)) * (torch.maximum(ay1, by1) - torch.minimum(ay0, by0))
    union = area(boxes_a) + area(boxes_b) - intersection
    # 0 / 1 where a pair is empty: exactly 0 with finite gradients, which 0 / tiny does not have.
    one = torch.ones_like(union)
    iou = intersection / torch.where(union > 0, union, one)
    return iou, iou - (hull - union) / torch.where(hull > 0, hull, one)
