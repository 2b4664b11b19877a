"""Boxes and captions on an image: a leaf, so that every result can draw itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import supervision

# Brightness (ITU-R BT.601 luma, 0…255) above which black is easier to read than white.
_BRIGHT = 140


def draw_boxes(image: np.ndarray, boxes_xyxy: np.ndarray, labels: np.ndarray, captions: Sequence[str]) -> np.ndarray:
    """Draw boxes, coloured by label, with a caption each; line and text grow with the image.

    Args:
        image: (height, width, 3) uint8 RGB; left as it is.
        boxes_xyxy: (N, 4) pixels. The first are drawn last, so that with the best first, the best stay on top.
        labels: (N,) integers that choose the colours.
        captions: the N texts.

    Returns:
        A new (height, width, 3) uint8 RGB array.
    """
    import supervision

    height, width = image.shape[:2]
    palette = supervision.ColorPalette.DEFAULT
    text_palette = supervision.ColorPalette([_readable_on(color) for color in palette.colors])
    back_to_front = np.arange(len(captions))[::-1]
    found = supervision.Detections(
        xyxy=np.asarray(boxes_xyxy, dtype=np.float32).reshape(-1, 4)[back_to_front],
        class_id=np.asarray(labels, dtype=int)[back_to_front],
    )
    thickness = supervision.calculate_optimal_line_thickness((width, height))
    drawn = supervision.BoxAnnotator(color=palette, thickness=thickness).annotate(image.copy(), found)
    annotator = supervision.LabelAnnotator(
        color=palette,
        text_color=text_palette,
        text_scale=max(0.35, supervision.calculate_optimal_text_scale((width, height)) * 0.8),
        text_thickness=1,
        text_padding=3,
        smart_position=True,
    )
    return annotator.annotate(drawn, found, labels=[captions[index] for index in back_to_front])


def _readable_on(color: supervision.Color) -> supervision.Color:
    """Black or white, whichever reads better on the colour."""
    import supervision

    luma = 0.299 * color.r + 0.587 * color.g + 0.114 * color.b
    return supervision.Color.BLACK if luma > _BRIGHT else supervision.Color.WHITE
