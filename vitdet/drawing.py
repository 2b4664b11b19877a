"""Boxes, captions and heat on an image: a leaf, so that every result can draw itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
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


def draw_caption(image: np.ndarray, rows: Sequence[tuple[str, str]]) -> np.ndarray:
    """Write rows into the top left corner, on a dark panel; the text grows with the image.

    Args:
        image: (height, width, 3) uint8 RGB; left as it is.
        rows: texts, left- and right-aligned. As many as fit into 40 % of the height are written, at least one; a left
            text too long for the image is cut and ends in an ellipsis.

    Returns:
        A new (height, width, 3) uint8 RGB array.
    """
    import matplotlib as mpl
    from PIL import Image, ImageDraw, ImageFont

    height, width = image.shape[:2]
    size = min(max(round(min(height, width) / 24), 10), 48)  # below 10 pixels letters are hard to read
    # Matplotlib brings a font that has Greek, Cyrillic and accents; Pillow's own has not.
    font = ImageFont.truetype(Path(mpl.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), size)
    line, margin = round(1.25 * size), max(2, size // 4)
    rows = rows[: max(1, int(0.4 * height - 2 * margin) // line)]
    room = width - 4 * margin
    fitted = [(_shortened(left, room - font.getlength(f" {right}"), font.getlength), right) for left, right in rows]
    panel_width = round(max((font.getlength(f"{left} {right}") for left, right in fitted), default=0)) + 2 * margin
    drawn = image.copy()
    if fitted:
        panel = drawn[margin : 3 * margin + line * len(fitted), margin : margin + panel_width]
        panel //= 4  # what lies below shows through a little
    picture = Image.fromarray(drawn)
    draw = ImageDraw.Draw(picture)
    for number, (left, right) in enumerate(fitted):
        y = 2 * margin + number * line
        draw.text((2 * margin, y), left, fill="white", font=font)
        draw.text((panel_width, y), right, fill="white", font=font, anchor="ra")
    return np.array(picture)


def _shortened(text: str, room: float, measure: Callable[[str], float]) -> str:
    """The longest beginning of a text that, with an ellipsis where it is cut, takes no more than the room."""
    if measure(text) <= room:
        return text
    for length in range(len(text) - 1, 0, -1):
        if measure(text[:length].rstrip() + "…") <= room:
            return text[:length].rstrip() + "…"
    return ""


def blend_heat(image: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """Lay a heat map over an image, half and half: blue where it is 0, through green, to red where it is 1.

    Args:
        image: (height, width, 3) uint8 RGB; left as it is.
        heat: (height, width) in [0, 1].

    Returns:
        A new (height, width, 3) uint8 RGB array.
    """
    import cv2

    levels = (np.clip(heat, 0, 1) * 255).round().astype(np.uint8)
    colours = cv2.cvtColor(cv2.applyColorMap(levels, cv2.COLORMAP_JET), cv2.COLOR_BGR2RGB)
    return cv2.addWeighted(image, 0.5, colours, 0.5, 0)


def _readable_on(color: supervision.Color) -> supervision.Color:
    """Black or white, whichever reads better on the colour."""
    import supervision

    luma = 0.299 * color.r + 0.587 * color.g + 0.114 * color.b
    return supervision.Color.BLACK if luma > _BRIGHT else supervision.Color.WHITE
