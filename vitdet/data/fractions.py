"""Boxes that files give as fractions of the upright image: YOLO's and Open Images'."""

from __future__ import annotations

import numpy as np

# Fractions beyond these are pixels; boxes may reach a little over the border.
LOWEST, HIGHEST = -1.0, 3.0
DIGITS = 9  # of pixels


def to_pixels(fractions: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(T, 4) ``xyxy`` fractions to pixels of an image of (height, width), rounded to 1e-9.

    Else a box of 32 x 32 comes back with an area a hair off 1024, where COCO's small objects end, and the figures of
    one data set differ between its formats.
    """
    height, width = size
    return np.round(fractions * np.array([width, height, width, height], dtype=np.float64), DIGITS)
