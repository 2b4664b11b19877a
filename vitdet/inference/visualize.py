"""Several pictures on one sheet, for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitdet.data.images import decode_image


def contact_sheet(
    images: Sequence[np.ndarray], *, columns: int = 4, tile: tuple[int, int] = (240, 320), gap: int = 4
) -> np.ndarray:
    """Several images on one white sheet, row by row.

    Args:
        images: (height, width, 3) uint8 RGB each; scaled to fit a tile and centred in it, proportions kept.
        columns: tiles a row; fewer when there are fewer images.
        tile: (height, width) of a tile in pixels.
        gap: pixels between tiles and around them.

    Raises:
        ValueError: no images, or a number that is not positive.
    """
    if not images or columns < 1 or min(tile) < 1 or gap < 0:
        raise ValueError(f"a contact sheet needs images, columns and a tile size, got {len(images)}, {columns}, {tile}")
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    tile_height, tile_width = tile
    sheet = np.full((rows * (tile_height + gap) + gap, columns * (tile_width + gap) + gap, 3), 255, dtype=np.uint8)
    for index, image in enumerate(images):
        small = _fit(image, tile)
        height, width = small.shape[:2]
        row, column = divmod(index, columns)
        top = gap + row * (tile_height + gap) + (tile_height - height) // 2
        left = gap + column * (tile_width + gap) + (tile_width - width) // 2
        sheet[top : top + height, left : left + width] = small
    return sheet


def save_sheet(pictures: Sequence[Path], path: Path) -> Path:
    """Put the pictures of these files on one sheet and write it to ``path``, which is returned."""
    from PIL import Image

    Image.fromarray(contact_sheet([decode_image(picture) for picture in pictures])).save(path, quality=95)
    return path


def _fit(image: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """The image scaled to the largest size that fits the tile."""
    from PIL import Image

    height, width = image.shape[:2]
    scale = min(tile[0] / height, tile[1] / width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    resampling = Image.Resampling.BOX if scale < 1 else Image.Resampling.NEAREST
    return np.asarray(Image.fromarray(image).resize(size, resampling))
