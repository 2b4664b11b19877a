"""Images of any kind in, :class:`~vitdet.structures.Detections` out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitdet.data.images import decode_image
from vitdet.data.transforms import resize
from vitdet.detectors.postprocess import postprocess
from vitdet.devices import pick_device
from vitdet.errors import UserError
from vitdet.inference.sources import iterate_images
from vitdet.structures import Detections


class _Sample(NamedTuple):
    """One image ready for the model: the original, the resized one, and the file it came from."""

    image: np.ndarray  # (height, width, 3)
    resized: np.ndarray  # (h, w, 3)
    path: Path | None


class Predictor:
    """Runs a detector on images.

    Args:
        model_or_source: a model with ``.metadata`` (class map, preprocessing), which is moved to the device and put
            into evaluation mode; or anything that ``vitdet.load_model`` takes.
        device: ``"auto"`` (CUDA, else MPS, else the CPU) or a name that torch knows.
        threshold: only detections with a score above it.
        batch_size: images a forward pass.
        top_k: at most this many detections an image.
        clip: whether boxes end at the image's border. The published evaluation does not clip.
        keep_images: whether each result holds its image, for drawing.
        workers: threads that decode and resize the next images while the model runs.

    Raises:
        UserError: an unknown or absent device, a model without metadata, a number out of its range.
    """

    def __init__(
        self,
        model_or_source: nn.Module | str | Path,
        *,
        device: str | torch.device = "auto",
        threshold: float = 0.5,
        batch_size: int = 8,
        top_k: int = 300,
        clip: bool = True,
        keep_images: bool = True,
        workers: int = 4,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("top_k", top_k), ("workers", workers)):
            if value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")
        self.threshold = _checked_threshold(threshold)
        self.device = pick_device(device)
        model = _load(model_or_source) if isinstance(model_or_source, (str, Path)) else model_or_source
        if getattr(model, "metadata", None) is None:
            raise UserError(
                f"the model {type(model).__name__} has no metadata (class map, preprocessing); "
                "load it with vitdet.load_model, or set model.metadata"
            )
        self.model = model.to(self.device).eval()
        self.metadata: Any = model.metadata
        self.batch_size = batch_size
        self.top_k = top_k
        self.clip = clip
        self.keep_images = keep_images
        self.workers = workers

    def __call__(self, images: Any, threshold: float | None = None) -> list[Detections]:
        """The detections of each image, in the order given; arguments and errors as for :meth:`stream`."""
        return list(self.stream(images, threshold))

    def stream(self, images: Any, threshold: float | None = None) -> Iterator[Detections]:
        """Detections one by one, as batches finish: a large folder never lies in memory.

        Args:
            images: what :func:`~vitdet.inference.sources.iterate_images` takes: a path, folder, pattern, array, tensor,
                Pillow image, or an iterable of these, which is read as far as needed.
            threshold: instead of the predictor's own.

        Yields:
            One result an image, in order; CPU tensors, pixels of the original image, best first.

        Raises:
            UserError: something is no image, does not exist or cannot be decoded; batches before it have been yielded.
        """
        threshold = self.threshold if threshold is None else _checked_threshold(threshold)
        return self._stream(images, threshold)

    def _stream(self, images: Any, threshold: float) -> Iterator[Detections]:
        samples = self._samples(iterate_images(images))
        while batch := list(islice(samples, self.batch_size)):
            yield from self._detect(batch, threshold)

    def _samples(self, items: Iterable[Path | np.ndarray]) -> Iterator[_Sample]:
        """Decoded and resized images in order, up to two batches ahead."""
        pending: deque[Future[_Sample]] = deque()
        with ThreadPoolExecutor(self.workers) as pool:
            try:
                for item in items:
                    pending.append(pool.submit(self._prepare, item))
                    if len(pending) > 2 * self.batch_size:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:  # an error, or a caller who has seen enough: leave the rest undone
                for future in pending:
                    future.cancel()

    def _prepare(self, item: Path | np.ndarray) -> _Sample:
        path = item if isinstance(item, Path) else None
        image = decode_image(item) if isinstance(item, Path) else item
        return _Sample(image, resize(image, self.metadata.preprocessing.size), path)

    def _detect(self, batch: list[_Sample], threshold: float) -> list[Detections]:
        pixels = torch.from_numpy(np.stack([sample.resized for sample in batch])).to(self.device)  # (B, h, w, 3)
        pixels = pixels.permute(0, 3, 1, 2).contiguous()  # (B, 3, h, w)
        sizes = torch.tensor([sample.image.shape[:2] for sample in batch])  # (B, 2)
        with torch.inference_mode():
            output = self.model(self.metadata.preprocessing.normalize(pixels))
            classes, names = output.logits.shape[-1], len(self.metadata.class_map)
            if classes != names:
                raise UserError(
                    f"the model has {classes} classes but its class map {names}; load the map it was trained with"
                )
            found = postprocess(output, sizes, top_k=self.top_k, threshold=threshold)
        return [self._result(sample, *one) for sample, one in zip(batch, found, strict=True)]

    def _result(self, sample: _Sample, boxes_xyxy: Tensor, scores: Tensor, labels: Tensor) -> Detections:
        height, width = sample.image.shape[:2]
        if self.clip:
            boxes_xyxy = boxes_xyxy.clamp(min=0).minimum(boxes_xyxy.new_tensor([width, height, width, height]))
        return Detections(
            boxes_xyxy=boxes_xyxy,
            scores=scores,
            labels=labels,
            names=[self.metadata.class_map.names[label] for label in labels.tolist()],
            image_size=(height, width),
            path=sample.path,
            image=sample.image if self.keep_images else None,
        )


def _load(source: str | Path) -> nn.Module:
    from vitdet import zoo

    return zoo.load_model(source)


def _checked_threshold(threshold: float) -> float:
    if not 0 <= threshold <= 1:
        raise UserError(f"threshold is {threshold}; scores are in [0, 1], and so must it be")
    return threshold
