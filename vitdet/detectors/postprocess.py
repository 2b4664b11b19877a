"""From a detector's output to objects in pixels: the top-k over queries x classes, without suppression.

RT-DETR's published protocol (arXiv 2304.08069; RT-DETRv2, D-FINE, DEIM and RF-DETR share it): sigmoid scores, the k
best of all (query, class) pairs, so that one query may give several detections; boxes are scaled to the original image
and not clipped to it.
"""

from __future__ import annotations

from torch import Tensor

from vitdet.boxes import cxcywh_to_xyxy
from vitdet.structures import DetectorOutput


def select_top_k(logits: Tensor, boxes: Tensor, top_k: int = 300) -> tuple[Tensor, Tensor, Tensor]:
    """The k best (query, class) pairs of each image, best first. Tensor operations only, so it can be exported.

    Args:
        logits: (B, Q, K), before the sigmoid.
        boxes: (B, Q, 4), any format.
        top_k: at most this many; all Q * K pairs where there are fewer.

    Returns:
        ``scores`` (B, k) float32 in [0, 1], ``labels`` (B, k) int64, ``boxes`` (B, k, 4) in the format given.
    """
    _, queries, classes = logits.shape
    # Ranked before the sigmoid: it keeps the order, but rounds strong logits to one and the same score.
    best, index = logits.float().flatten(1).topk(min(top_k, queries * classes), dim=1)  # (B, k)
    query = (index // classes).unsqueeze(-1).expand(-1, -1, 4)  # (B, k, 4)
    return best.sigmoid(), index % classes, boxes.gather(1, query)


def postprocess(
    output: DetectorOutput, orig_sizes: Tensor, *, top_k: int = 300, threshold: float = 0.0
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The detections of each image in pixels of the original image.

    Args:
        output: ``logits`` (B, Q, K) and ``boxes`` (B, Q, 4) ``cxcywh`` in [0, 1].
        orig_sizes: (B, 2) heights and widths of the original images.
        top_k: at most this many detections an image.
        threshold: only scores above it.

    Returns:
        One ``(boxes_xyxy (N, 4) float32, scores (N,) float32, labels (N,) int64)`` an image, best first, on the CPU;
        boxes may reach beyond the image.
    """
    scores, labels, boxes = select_top_k(output.logits, output.boxes, top_k)
    # To the CPU before the selection: N depends on the values, and each image would make the device wait.
    scores, labels, boxes = scores.cpu(), labels.cpu(), boxes.float().cpu()
    scale = orig_sizes.cpu().to(boxes.dtype).flip(1).repeat(1, 2)  # (B, 2) height, width -> (B, 4) width, height, twice
    boxes_xyxy = cxcywh_to_xyxy(boxes) * scale[:, None]  # (B, k, 4)
    keep = scores > threshold
    return [(boxes_xyxy[i, kept], scores[i, kept], labels[i, kept]) for i, kept in enumerate(keep)]
