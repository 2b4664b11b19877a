"""The data set that a DataLoader sees: keys in, augmented samples out."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import Dataset

from vitdet.data.cache import ImageCache
from vitdet.data.images import decode_image
from vitdet.data.keys import SampleKey
from vitdet.data.mixing import mixup, mosaic
from vitdet.data.records import DetectionSet
from vitdet.data.transforms import Sample, Transform, check_probabilities
from vitdet.errors import UserError


class DetectionDataset(Dataset):
    """Decodes, augments and resizes images. A sample depends on the seed and its key only.

    Args:
        data: the records.
        transform: a ``TrainTransform`` or ``EvalTransform``.
        mosaic: probability of a mosaic with three other images, where the key says strong and mix.
        mixup: probability of blending with another sample, as likely a mosaic, where the key says strong and mix.
        seed: of all randomness, together with epoch and index.
        cache: keep decoded images in memory.
        cache_bytes: bound of that memory; images beyond it are decoded again each time.
    """

    def __init__(
        self,
        data: DetectionSet,
        *,
        transform: Transform,
        mosaic: float = 0.0,
        mixup: float = 0.0,
        seed: int = 0,
        cache: bool = False,
        cache_bytes: int = 2 * 2**30,
    ) -> None:
        check_probabilities(mosaic=mosaic, mixup=mixup)
        self.data = data
        self.transform = transform
        self.mosaic = mosaic
        self.mixup = mixup
        self.seed = seed
        self.images = ImageCache(self._decode, length=len(data), limit=cache_bytes if cache else 0)
        self._targets = [record.training_targets() for record in data.records]

    def __len__(self) -> int:
        return len(self.data.records)

    def __getitem__(self, key: SampleKey) -> tuple[np.ndarray, dict[str, Any]]:
        """One sample.

        Returns:
            The image (height, width, 3) uint8 RGB, and ``boxes`` (T, 4) float32 ``xyxy`` pixels of that image,
            ``labels`` (T,) int64, ``image_id``, ``orig_size`` (height, width) of the file.

        Raises:
            UserError: the image cannot be decoded, or has another size than its annotation says.
        """
        rng = key.generator(self.seed)
        sample = self._augmented(key, rng)
        if key.strong and key.mix and rng.random() < self.mixup:
            other = key._replace(index=int(rng.integers(len(self))))
            sample = mixup(sample, self._augmented(other, rng), rng)
        image, boxes, labels = sample
        record = self.data.records[key.index]
        target = {"boxes": boxes, "labels": labels, "image_id": record.image_id, "orig_size": record.size}
        return image, target

    def _augmented(self, key: SampleKey, rng: np.random.Generator) -> Sample:
        """The image of a key, or a mosaic of it and others, augmented."""
        composed = key.strong and key.mix and rng.random() < self.mosaic
        sample = self._mosaic(key.index, key.size, rng) if composed else self.load(key.index)
        return self.transform(*sample, size=key.size, rng=rng, strong=key.strong, composed=composed)

    def load(self, index: int) -> Sample:
        """One image as it is on disk with its training targets; do not write to them, they may be shared."""
        boxes, labels = self._targets[index]
        return self.images[index], boxes, labels

    def _mosaic(self, index: int, size: tuple[int, int], rng: np.random.Generator) -> Sample:
        """A mosaic of this image and three random ones, in random order."""
        chosen = np.array([index, *rng.integers(len(self), size=3)])
        return mosaic([self.load(int(i)) for i in rng.permutation(chosen)], size=size, rng=rng)

    def _decode(self, index: int) -> np.ndarray:
        """The image of a record, which must have the size that its annotation says."""
        record = self.data.records[index]
        image = decode_image(record.path)
        height, width = image.shape[:2]
        if (height, width) != record.size:
            raise UserError(
                f"image {record.path} is {width} x {height} pixels (upright) but its annotation says "
                f"{record.size[1]} x {record.size[0]}: correct the annotation, or its boxes will not fit"
            )
        return image
