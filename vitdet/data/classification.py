"""The data set of whole images that a DataLoader sees: keys in, augmented samples out."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from torch.utils.data import Dataset

from vitdet.data.cache import ImageCache
from vitdet.data.images import decode_image
from vitdet.data.keys import SampleKey
from vitdet.data.records import ClassificationSet


class ImageTransform(Protocol):
    """The signature shared by training and evaluation."""

    def __call__(
        self, image: np.ndarray, *, size: tuple[int, int], rng: np.random.Generator, strong: bool = True
    ) -> np.ndarray:
        """(h, w, 3) uint8 to (height, width, 3) uint8, with all randomness from ``rng``."""
        ...


class ClassificationDataset(Dataset):
    """Decodes, augments and resizes images. A sample depends on the seed and its key only.

    Args:
        data: the image files and their labels.
        transform: a ``ClassificationTransform`` or ``ClassificationEvalTransform``.
        seed: of all randomness, together with epoch, index and copy.
        cache: keep decoded images in memory.
        cache_bytes: bound of that memory; images beyond it are decoded again each time.
    """

    def __init__(
        self,
        data: ClassificationSet,
        *,
        transform: ImageTransform,
        seed: int = 0,
        cache: bool = False,
        cache_bytes: int = 2 * 2**30,
    ) -> None:
        self.data = data
        self.transform = transform
        self.seed = seed
        self.images = ImageCache(self._decode, length=len(data), limit=cache_bytes if cache else 0)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, key: SampleKey) -> tuple[np.ndarray, dict[str, Any]]:
        """One sample.

        Returns:
            The image (height, width, 3) uint8 RGB, and its ``label`` and ``index``.

        Raises:
            UserError: the image cannot be decoded.
        """
        image = self.images[key.index]
        image = self.transform(image, size=key.size, rng=key.generator(self.seed), strong=key.strong)
        return image, {"label": int(self.data.labels[key.index]), "index": key.index}

    def _decode(self, index: int) -> np.ndarray:
        return decode_image(self.data.paths[index])
