"""From a detector's output to objects in pixels, without suppression: the top-k over queries x classes, or queries.

RT-DETR's published protocol (arXiv 2304.08069; RT-DETRv2, D-FINE, DEIM and RF-DETR share it): sigmoid scores, the k
best of all (query, class) pairs, so that one query may give several detections; boxes are scaled to the original image
and not clipped to it. DETR's (arXiv 2005.12872) differs: a query gives one detection, of its likeliest class by the
softmax in which "no object" takes part.
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


def select_likeliest(logits: Tensor, boxes: Tensor, top_k: int = 300) -> tuple[Tensor, Tensor, Tensor]:
    """Each query's likeliest class, the k best queries of each image, best first.

    Args:
        logits: (B, Q, K + 1), before the softmax; the last is of "no object".
        boxes, top_k: as of :func:`select_top_k`, whose results these are, too; k is at most Q.
    """
    likeliest, label = logits.float().softmax(-1)[..., :-1].max(-1)  # (B, Q)
    best, query = likeliest.topk(min(top_k, logits.shape[1]), dim=1)  # (B, k)
    return best, label.gather(1, query), boxes.gather(1, query[..., None].expand(-1, -1, 4))


def postprocess(
    output: DetectorOutput, orig_sizes: Tensor, *, top_k: int = 300, threshold: float = 0.0
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The detections of each image in pixels of the original image.

    Args:
        output: of a detector; ``no_object`` decides how its scores are read.
        orig_sizes: (B, 2) heights and widths of the original images.
        top_k: at most this many detections an image.
        threshold: only scores above it.

    Returns:
        One ``(boxes_xyxy (N, 4) float32, scores (N,) float32, labels (N,) int64)`` an image, best first, on the CPU;
        boxes may reach beyond the image.
    """
    select = select_likeliest if output.no_object else select_top_k
    scores, labels, boxes = select(output.logits, output.boxes, top_k)
    # To the CPU before the selection: N depends on the values, and each image would make the device wait.
    scores, labels, boxes = scores.cpu(), labels.cpu(), boxes.float().cpu()
    scale = orig_sizes.cpu().to(boxes.dtype).flip(1).repeat(1, 2)  # (B, 2) height, width -> (B, 4) width, height, twice
    boxes_xyxy = cxcywh_to_xyxy(boxes) * scale[:, None]  # (B, k, 4)
    keep = scores > threshold
    return [(boxes_xyxy[i, kept], scores[i, kept], labels[i, kept]) for i, kept in enumerate(keep)]
