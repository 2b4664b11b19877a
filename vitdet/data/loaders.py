"""Batches: which samples an epoch takes, in which order and size, and how they become tensors.

Everything is a function of (seed, epoch, batch number), so that a resumed run continues with the batch that came next.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from vitdet import boxes as box_ops
from vitdet.data.classification import ClassificationDataset
from vitdet.data.detection import DetectionDataset
from vitdet.data.keys import SampleKey
from vitdet.errors import UserError
from vitdet.structures import ImageTargets, Targets

Collate = Callable[[list[tuple[np.ndarray, dict[str, Any]]]], dict[str, Any]]


class EpochBatchSampler:
    """Yields lists of :class:`SampleKey`, one list a batch, for one rank.

    Args:
        length: number of samples in the data set, at least 1.
        batch_size: samples a batch on each rank.
        seed: of the order and of the sizes.
        epoch: the first epoch; see :meth:`set_epoch`.
        shuffle: False keeps the order of the data set, for evaluation.
        drop_last: leave out the samples that fill no batch. A data set smaller than one batch still gives one, smaller
            batch. False gives the last batch what is left, which on several ranks may differ in size or be none.
        sizes: (height, width) of the images; with several, each batch draws one, the same on all ranks.
        strong_from, strong_until: the epochs from which strong augmentation is on and off; None for never off.
        final_size: (height, width) of the batches from then on, where given; else they go on as before.
        mix: the epochs, from the first to before the second, in which images may be mixed; None for no end.
        rank, world_size: this process among those that share the epoch.
        start_batch: first batch to yield; see :meth:`set_start`.
        repeats: how many differently augmented copies of an image follow one another (repeated augmentation, arXiv
            1902.05509). The epoch keeps its length, and so shows ``length / repeats`` of the images.
    """

    def __init__(
        self,
        *,
        length: int,
        batch_size: int,
        seed: int,
        sizes: list[tuple[int, int]],
        epoch: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        strong_from: int = 0,
        strong_until: int | None = None,
        final_size: tuple[int, int] | None = None,
        mix: tuple[int, int | None] = (0, None),
        rank: int = 0,
        world_size: int = 1,
        start_batch: int = 0,
        repeats: int = 1,
    ) -> None:
        if length < 1 or batch_size < 1:
            raise ValueError(f"length and batch_size must be at least 1, got {length} and {batch_size}")
        if not sizes:
            raise ValueError("sizes must hold at least one (height, width)")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0…{world_size - 1}, got {rank}")
        if repeats < 1 or (repeats > 1 and not shuffle):
            raise ValueError(f"repeats must be at least 1, and 1 without shuffle, got {repeats}")
        self.length = length
        self.batch_size = batch_size
        self.seed = seed
        self.sizes = [(int(height), int(width)) for height, width in sizes]
        self.epoch = epoch
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.strong_from = strong_from
        self.strong_until = strong_until
        self.final_size = final_size
        self.mix = mix
        self.rank = rank
        self.world_size = world_size
        self.start_batch = start_batch
        self.repeats = repeats

    @property
    def batches_per_epoch(self) -> int:
        """Batches of a whole epoch, wherever this one starts."""
        group = self.batch_size * self.world_size
        if self.drop_last:
            return max(self.length // group, 1)
        full, rest = divmod(self.length, group)
        return full + (self.rank < rest)  # the last group is dealt out one by one

    def __len__(self) -> int:
        return max(self.batches_per_epoch - self.start_batch, 0)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of ``epoch``."""
        self.epoch = epoch
        self.start_batch = 0

    def set_start(self, batch: int) -> None:
        """Start the current epoch at ``batch``, to resume within it."""
        self.start_batch = batch

    def __iter__(self) -> Iterator[list[SampleKey]]:
        order = np.arange(self.length)
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(order)
        # The copies of an image stand side by side, so that they fall into one batch, dealt out to the ranks.
        order = np.repeat(order, self.repeats)[: self.length]
        copies = np.arange(self.length) % self.repeats
        group = self.batch_size * self.world_size
        if self.drop_last and self.length < group:
            # Every rank gets the same number of samples, or gradients would wait for a batch that never comes.
            filled = -(-self.length // self.world_size) * self.world_size
            order, copies = np.resize(order, filled), np.resize(copies, filled)
        epoch = self.epoch
        strong = self.is_strong(epoch)
        mix = self.mix[0] <= epoch and (self.mix[1] is None or epoch < self.mix[1])
        for batch in range(self.start_batch, self.batches_per_epoch):
            size = self.size_of(batch, epoch)
            own = slice(batch * group + self.rank, (batch + 1) * group, self.world_size)
            pairs = zip(order[own].tolist(), copies[own].tolist(), strict=True)
            yield [SampleKey(index, epoch, size, strong, copy, mix) for index, copy in pairs]

    def is_strong(self, epoch: int) -> bool:
        """Whether strong augmentation is on."""
        return self.strong_from <= epoch and not self.is_late(epoch)

    def is_late(self, epoch: int) -> bool:
        """Whether strong augmentation is over."""
        return self.strong_until is not None and epoch >= self.strong_until

    def size_of(self, batch: int, epoch: int) -> tuple[int, int]:
        """The (height, width) of a batch."""
        if self.final_size is not None and self.is_late(epoch):
            return self.final_size
        if len(self.sizes) == 1:
            return self.sizes[0]
        return self.sizes[np.random.default_rng([self.seed, epoch, batch]).integers(len(self.sizes))]


def collate(samples: list[tuple[np.ndarray, dict[str, Any]]], *, pad: bool = False) -> dict[str, Any]:
    """Detection samples to a batch; with ``pad`` their sizes may differ, see :func:`stack_images`.

    Returns:
        ``images`` (B, 3, h, w) uint8 RGB, ``targets`` (:class:`Targets`, ``cxcywh`` in [0, 1], shares of each image
        without its padding), ``image_ids`` (a list), ``orig_sizes`` (B, 2) int64 (height, width); and ``sizes`` of the
        images, the same, where any was padded.
    """
    boxes = []
    for image, target in samples:
        height, width = image.shape[:2]
        scale = torch.tensor([width, height, width, height], dtype=torch.float32)
        boxes.append(box_ops.xyxy_to_cxcywh(torch.from_numpy(target["boxes"]) / scale))
    images, sizes = stack_images([image for image, _ in samples], pad=pad)
    return ({} if sizes is None else {"sizes": sizes}) | {
        "images": images,
        "targets": Targets.from_lists(boxes, [torch.from_numpy(target["labels"]) for _, target in samples]),
        "image_ids": [target["image_id"] for _, target in samples],
        "orig_sizes": torch.tensor([target["orig_size"] for _, target in samples], dtype=torch.int64),
    }


def collate_images(samples: list[tuple[np.ndarray, dict[str, Any]]], *, num_classes: int) -> dict[str, Any]:
    """Classification samples of one size to a batch.

    Returns:
        ``images`` (B, 3, h, w) uint8 RGB, ``targets`` (:class:`ImageTargets`, one-hot), ``labels`` (B,) int64,
        ``indices`` (a list): positions in the data set.
    """
    labels = torch.tensor([target["label"] for _, target in samples], dtype=torch.int64)
    return {
        "images": stack_images([image for image, _ in samples])[0],
        "targets": ImageTargets.from_labels(labels, num_classes),
        "labels": labels,
        "indices": [target["index"] for _, target in samples],
    }


def stack_images(images: list[np.ndarray], *, pad: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """B images (h, w, 3) uint8 of one size as (B, 3, h, w).

    With ``pad`` they may differ in size: what lies to the right of them and below is 0, and their (B, 2) int64 heights
    and widths come second; None where all have one size.
    """
    shapes = [image.shape[:2] for image in images]
    if len(set(shapes)) > 1 and not pad:
        other = next(shape for shape in shapes if shape != shapes[0])
        raise ValueError(f"images of a batch must have one size, got {shapes[0]} and {other}")
    padded = len(set(shapes)) > 1
    make = torch.zeros if padded else torch.empty
    batch = make(len(images), 3, max(h for h, _ in shapes), max(w for _, w in shapes), dtype=torch.uint8)
    for planes, image, (height, width) in zip(batch.numpy(), images, shapes, strict=True):
        # Writes in place; a strided copy by numpy or torch is twenty times slower.
        cv2.split(image, [plane[:height, :width] for plane in planes])
    return batch, torch.tensor(shapes, dtype=torch.int64) if padded else None


class Loader:
    """A DataLoader whose workers' user errors arrive as the one sentence they are, without the worker's traceback."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader
        self.dataset = loader.dataset
        self.batch_sampler = loader.batch_sampler

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            yield from self.loader
        except UserError as error:
            sentence = str(error).rpartition("UserError: ")[2].strip()
            # Its traceback holds the iterator in a reference cycle, and collected as one, workers take 5 s to stop.
            raise UserError(sentence) from error.with_traceback(None)


def make_loader(
    dataset: DetectionDataset | ClassificationDataset,
    *,
    batch_sampler: EpochBatchSampler,
    workers: int,
    pin_memory: bool = False,
    collate: Collate = collate,
) -> Loader:
    """The loader of a data set; ``workers`` processes, which live as long as it does, or 0 for none.

    A cache is filled first where workers are forked, so that they share it; other workers fill their own part of it.
    ``collate`` makes a batch of the samples: for classification, a ``functools.partial`` of :func:`collate_images`.
    """
    cv2.setNumThreads(0)  # its own pool of threads would compete with torch's; the work here is too small for it
    if workers and multiprocessing.get_start_method() == "fork":
        dataset.images.fill()
    loader: DataLoader = DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin_memory,
        persistent_workers=workers > 0,
        worker_init_fn=_start_worker,
        # Its own: it would draw from the global generator, with workers at other times than without, and so change
        # the model's random numbers.
        generator=torch.Generator(),
    )
    return Loader(loader)


def _start_worker(worker: int) -> None:
    """One thread a worker: the processes are the parallelism."""
    del worker
    cv2.setNumThreads(0)  # a spawned worker has not seen the call above
    torch.set_num_threads(1)
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, DetectionDataset | ClassificationDataset):
        info.dataset.images.share_limit(info.num_workers)
