"""Decoded images kept in memory, shared by the data sets of all tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class ImageCache:
    """Decodes images, and keeps as many as fit; the others are decoded again each time.

    Args:
        decode: position -> (h, w, 3) uint8 image.
        length: number of images.
        limit: bound of the memory in bytes; 0 keeps nothing.
    """

    def __init__(self, decode: Callable[[int], np.ndarray], *, length: int, limit: int) -> None:
        self._decode = decode
        self._length = length
        self._limit = limit
        self._used = 0
        self._images: dict[int, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What a spawned worker gets: everything but the decoded images."""
        return {**self.__dict__, "_images": {}, "_used": 0}

    def __getitem__(self, index: int) -> np.ndarray:
        """The decoded image; do not write to it, it may be shared."""
        image = self._images.get(index)
        if image is None:
            image = self._decode(index)
            self._keep(index, image)
        return image

    def fill(self) -> None:
        """Decode until the first image that does not fit; workers forked afterwards share what is there."""
        for index in range(self._length if self._limit else 0):
            if index not in self._images and not self._keep(index, self._decode(index)):
                return

    def share_limit(self, workers: int) -> None:
        """Called in each of ``workers`` processes: where they inherited no filled cache, each may fill its part."""
        if not self._images:
            self._limit //= workers

    def _keep(self, index: int, image: np.ndarray) -> bool:
        """Keep an image if there is room for it."""
        fits = self._used + image.nbytes <= self._limit
        if fits:
            self._images[index] = image
            self._used += image.nbytes
        return fits
