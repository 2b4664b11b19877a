"""Which part of an image a sample shows: zoom-out, crops and scale as windows over it, and the boxes left in one.

Sources: SSD (arXiv 1512.02325, section 2.2) for zoom-out and IoU crop; DETR (arXiv 2005.12872, appendix A.4) for the
crop by size.
"""

from __future__ import annotations

import numpy as np

Window = tuple[int, int, int, int]  # x0, y0, x1, y1 in the image's pixels; may reach beyond the image

MAX_ZOOM_OUT = 4.0  # side of the canvas over the side of the image
CROP_IOUS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)  # 1.0 stands for "no crop"
CROP_TRIALS = 40
SIZE_CROP_SIDES = (400, 500, 600)  # DETR's crop is 384 to 600 pixels a side at one of these shorter sides
SIZE_CROP_LEAST, SIZE_CROP_MOST = 384, 600


def zoom_out(window: Window, rng: np.random.Generator) -> Window:
    """A canvas around the window, up to ``MAX_ZOOM_OUT`` times its sides, with the window at a random place."""
    x0, y0, x1, y1 = window
    factor = rng.uniform(1.0, MAX_ZOOM_OUT)
    extra_x, extra_y = int((x1 - x0) * (factor - 1)), int((y1 - y0) * (factor - 1))
    left, top = int(extra_x * rng.random()), int(extra_y * rng.random())
    return x0 - left, y0 - top, x1 - left + extra_x, y1 - top + extra_y


def iou_crop(window: Window, boxes: np.ndarray, rng: np.random.Generator) -> Window:
    """SSD's crop: 0.3 to 1 of each side, aspect 0.5 to 2, and the best IoU with a kept box at least a drawn bound.

    The trials for one bound are drawn together; without boxes no crop is valid, and the window stays.
    """
    x0, y0, x1, y1 = window
    width, height = x1 - x0, y1 - y0
    while len(boxes):
        bound = CROP_IOUS[rng.integers(len(CROP_IOUS))]
        if bound >= 1.0:
            break
        draws = rng.random((CROP_TRIALS, 4))
        crop_w = (width * (0.3 + 0.7 * draws[:, 0])).astype(int)
        crop_h = (height * (0.3 + 0.7 * draws[:, 1])).astype(int)
        left = x0 + ((width - crop_w) * draws[:, 2]).astype(int)
        top = y0 + ((height - crop_h) * draws[:, 3]).astype(int)
        crops = np.stack([left, top, left + crop_w, top + crop_h], axis=1)  # (trials, 4)
        # Compared as products: a side of the crop may be 0 pixels.
        valid = (crop_w > 0) & (crop_h > 0) & (crop_w >= 0.5 * crop_h) & (crop_w <= 2.0 * crop_h)
        valid &= best_iou(crops, boxes) >= bound
        if valid.any():
            a, b, c, d = crops[int(valid.argmax())].tolist()
            return a, b, c, d
    return window


def best_iou(crops: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """For each of (n, 4) crops, its largest IoU with a box (T, 4) whose centre it contains; -1 without such a box."""
    crops = crops[:, None].astype(np.float64)  # (n, 1, 4)
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    contained = ((centres > crops[..., :2]) & (centres < crops[..., 2:])).all(axis=-1)  # (n, T)
    sides = np.minimum(crops[..., 2:], boxes[:, 2:]) - np.maximum(crops[..., :2], boxes[:, :2])
    shared = sides.clip(min=0).prod(axis=-1)
    areas = (crops[..., 2:] - crops[..., :2]).prod(axis=-1) + (boxes[:, 2:] - boxes[:, :2]).prod(axis=-1)
    iou = shared / np.maximum(areas - shared, 1e-9)
    return np.where(contained, iou, -1.0).max(axis=1)


def rescale(window: Window, limits: tuple[float, float], rng: np.random.Generator) -> Window:
    """A window smaller (the image grows) or larger by a log-uniform factor, at a random place inside or around."""
    x0, y0, x1, y1 = window
    factor = float(np.exp(rng.uniform(*np.log(limits))))
    width, height = max(round((x1 - x0) / factor), 1), max(round((y1 - y0) / factor), 1)
    left = x0 + round((x1 - x0 - width) * rng.random())
    top = y0 + round((y1 - y0 - height) * rng.random())
    return left, top, left + width, top + height


def size_crop(window: Window, rng: np.random.Generator) -> Window:
    """A part of the window of 384 to 600 pixels a side, counted where its shorter side would have 400, 500 or 600."""
    x0, y0, x1, y1 = window
    width, height = x1 - x0, y1 - y0
    scale = SIZE_CROP_SIDES[rng.integers(len(SIZE_CROP_SIDES))] / min(width, height)
    sides = []
    for side in (width, height):
        pixels = rng.integers(SIZE_CROP_LEAST, min(int(side * scale), SIZE_CROP_MOST), endpoint=True)
        sides.append(min(max(round(float(pixels) / scale), 1), side))
    left, top = x0 + int(rng.integers(width - sides[0] + 1)), y0 + int(rng.integers(height - sides[1] + 1))
    return left, top, left + sides[0], top + sides[1]


def boxes_inside(
    boxes: np.ndarray, labels: np.ndarray, window: Window, least: float, *, centred: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """The boxes clipped to the window whose sides have ``least`` pixels; ``centred``: and whose centres lie in it."""
    low, high = np.array(window[:2], dtype=np.float32), np.array(window[2:], dtype=np.float32)
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    clipped = np.clip(boxes, np.tile(low, 2), np.tile(high, 2))
    keep = large_boxes(clipped, least)
    if centred:
        keep &= ((centres > low) & (centres < high)).all(axis=1)
    return clipped[keep], labels[keep]


def large_boxes(boxes: np.ndarray, least: float) -> np.ndarray:
    """Which boxes (T, 4) have both sides at least ``least`` pixels: (T,) bool."""
    return ((boxes[:, 2:] - boxes[:, :2]) >= least).all(axis=1)
