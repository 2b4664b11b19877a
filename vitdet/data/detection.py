"""The data set that a DataLoader sees: keys in, augmented samples out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from vitdet.data.images import decode_image
from vitdet.data.mixing import mixup, mosaic
from vitdet.data.records import DetectionSet
from vitdet.data.transforms import Sample, Transform, check_probabilities
from vitdet.errors import UserError


class SampleKey(NamedTuple):
    """What the sampler asks for. It carries the epoch because persistent workers never see the loader's own.

    Attributes:
        index: position in the data set.
        epoch: the epoch, part of the sample's randomness.
        size: (height, width) of the wanted image.
        strong: whether mosaic, mixup, zoom-out, IoU crop and photometric distortion are on.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which no key needs
    epoch: int
    size: tuple[int, int]
    strong: bool


class DetectionDataset(Dataset):
    """Decodes, augments and resizes images. A sample depends on the seed and its key only.

    Args:
        data: the records.
        transform: a ``TrainTransform`` or ``EvalTransform``.
        mosaic: probability of a mosaic with three other images, where the key says strong.
        mixup: probability of blending with another image, where the key says strong.
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
        self.cache_bytes = cache_bytes if cache else 0
        self._cached_bytes = 0
        self._cache: dict[int, np.ndarray] = {}
        self._targets = [record.training_targets() for record in data.records]

    def __len__(self) -> int:
        return len(self.data.records)

    def __getstate__(self) -> dict[str, Any]:
        """What a spawned worker gets: everything but the decoded images."""
        return {**self.__dict__, "_cache": {}, "_cached_bytes": 0}

    def __getitem__(self, key: SampleKey) -> tuple[np.ndarray, dict[str, Any]]:
        """One sample.

        Returns:
            The image (height, width, 3) uint8 RGB, and ``boxes`` (T, 4) float32 ``xyxy`` pixels of that image,
            ``labels`` (T,) int64, ``image_id``, ``orig_size`` (height, width) of the file.

        Raises:
            UserError: the image cannot be decoded, or has another size than its annotation says.
        """
        index, epoch, size, strong = key
        rng = np.random.default_rng([self.seed, epoch, index])
        composed = strong and rng.random() < self.mosaic
        sample = self._mosaic(index, size, rng) if composed else self.load(index)
        image, boxes, labels = self.transform(*sample, size=size, rng=rng, strong=strong, composed=composed)
        if strong and rng.random() < self.mixup:
            other = self.load(int(rng.integers(len(self))))
            other = self.transform(*other, size=size, rng=rng, strong=strong)
            image, boxes, labels = mixup((image, boxes, labels), other, rng)
        record = self.data.records[index]
        target = {"boxes": boxes, "labels": labels, "image_id": record.image_id, "orig_size": record.size}
        return image, target

    def load(self, index: int) -> Sample:
        """One image as it is on disk with its training targets; do not write to them, they may be shared."""
        boxes, labels = self._targets[index]
        return self._image(index), boxes, labels

    def fill_cache(self) -> None:
        """Decode into the cache as many images as it may hold; forked workers then share them."""
        for index in range(len(self)):
            if self._cached_bytes >= self.cache_bytes:
                return
            self._image(index)

    def share_cache_bound(self, workers: int) -> None:
        """Called in each of ``workers`` processes: where they inherited no filled cache, each may fill its part."""
        if not self._cache:
            self.cache_bytes //= workers

    def _mosaic(self, index: int, size: tuple[int, int], rng: np.random.Generator) -> Sample:
        """A mosaic of this image and three random ones, in random order."""
        chosen = np.array([index, *rng.integers(len(self), size=3)])
        return mosaic([self.load(int(i)) for i in rng.permutation(chosen)], size=size, rng=rng)

    def _image(self, index: int) -> np.ndarray:
        """The decoded image, from the cache if it is there."""
        image = self._cache.get(index)
        if image is not None:
            return image
        record = self.data.records[index]
        image = decode_image(record.path)
        height, width = image.shape[:2]
        if (height, width) != record.size:
            raise UserError(
                f"image {record.path} is {width} x {height} pixels (upright) but its annotation says "
                f"{record.size[1]} x {record.size[0]}: correct the annotation, or its boxes will not fit"
            )
        if self._cached_bytes + image.nbytes <= self.cache_bytes:
            self._cache[index] = image
            self._cached_bytes += image.nbytes
        return image
