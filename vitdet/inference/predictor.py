"""Images of any kind in; detections out, or classes, as the model has it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitdet.data.images import decode_image
from vitdet.data.loaders import stack_images
from vitdet.data.transforms import to_input
from vitdet.detectors.postprocess import postprocess
from vitdet.devices import pick_device
from vitdet.errors import UserError
from vitdet.inference import attention as attention_maps
from vitdet.inference.sources import iterate_images
from vitdet.results import Classification, Detections
from vitdet.structures import DetectorOutput


class _Sample(NamedTuple):
    """One image ready for the model: the original, the model's input, and the file it came from."""

    image: np.ndarray  # (height, width, 3)
    pixels: np.ndarray  # (h, w, 3)
    path: Path | None


class Predictor:
    """Runs a detector or a classifier on images.

    Args:
        model_or_source: a model with ``.metadata`` (class map, preprocessing), which is moved to the device and put
            into evaluation mode; or anything that ``vitdet.load_model`` takes.
        device: ``"auto"`` (CUDA, else MPS, else the CPU) or a name that torch knows.
        threshold: of a detector only detections with a score above it; classes are ranked, whatever their scores.
        batch_size: images a forward pass.
        top_k: at most this many detections an image.
        top: at most this many classes an image.
        clip: whether boxes end at the image's border. The published evaluation does not clip.
        keep_images: whether each result holds its image, for drawing.
        attention: whether each classification holds where the model looked: ``"rollout"`` (also True) through all
            layers, or ``"last"``, the last layer only; see :mod:`vitdet.inference.attention`. Costs a second pass.
        workers: threads that decode and resize the next images while the model runs.

    Raises:
        UserError: an unknown or absent device, a model without metadata, a number out of its range, or attention
            of a model that has none to show.
    """

    def __init__(
        self,
        model_or_source: nn.Module | str | Path,
        *,
        device: str | torch.device = "auto",
        threshold: float = 0.5,
        batch_size: int = 8,
        top_k: int = 300,
        top: int = 5,
        clip: bool = True,
        keep_images: bool = True,
        attention: bool | str = False,
        workers: int = 4,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("top_k", top_k), ("top", top), ("workers", workers)):
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
        self.attention = "rollout" if attention is True else attention
        if self.attention:
            attention_maps.check_model(model, self.attention)
        self.model = model.to(self.device).eval()
        self.metadata: Any = model.metadata
        self.batch_size = batch_size
        self.top_k = top_k
        self.top = top
        self.clip = clip
        self.keep_images = keep_images
        self.workers = workers

    def __call__(self, images: Any, threshold: float | None = None) -> list[Detections | Classification]:
        """The result of each image, in the order given; arguments and errors as for :meth:`stream`."""
        return list(self.stream(images, threshold))

    def stream(self, images: Any, threshold: float | None = None) -> Iterator[Detections | Classification]:
        """Results one by one, as batches finish: a large folder never lies in memory.

        Args:
            images: what :func:`~vitdet.inference.sources.iterate_images` takes: a path, folder, pattern, array, tensor,
                Pillow image, or an iterable of these, which is read as far as needed.
            threshold: instead of the predictor's own.

        Yields:
            One result an image, in order: Detections where the model gives a ``DetectorOutput``, a Classification
            where it gives (B, K) logits; CPU tensors, pixels of the original image, best first.

        Raises:
            UserError: something is no image, does not exist or cannot be decoded, or a classifier's scores are not
                finite; batches before it have been yielded.
        """
        threshold = self.threshold if threshold is None else _checked_threshold(threshold)
        return self._stream(images, threshold)

    def _stream(self, images: Any, threshold: float) -> Iterator[Detections | Classification]:
        samples = self._samples(iterate_images(images))
        while batch := list(islice(samples, self.batch_size)):
            yield from self._results(batch, threshold)

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
        return _Sample(image, to_input(image, self.metadata.preprocessing), path)

    def _results(self, batch: list[_Sample], threshold: float) -> Sequence[Detections | Classification]:
        preprocessing = self.metadata.preprocessing
        pixels, sizes = stack_images([sample.pixels for sample in batch], pad=preprocessing.longest is not None)
        padding = {} if sizes is None else {"sizes": sizes.to(self.device)}
        with torch.inference_mode():
            images = preprocessing.normalize(pixels.to(self.device), **padding)
            output = self.model(images, **padding)
            classifier = isinstance(output, Tensor)
            classes = output.shape[-1] if classifier else output.num_classes
            names = len(self.metadata.class_map)
            if classifier and not names:
                raise UserError("the model gives features and knows no classes; train a head on it first")
            if classes != names:
                raise UserError(
                    f"the model has {classes} classes but its class map {names}; load the map it was trained with"
                )
            return self._classify(batch, images, output) if classifier else self._detect(batch, output, threshold)

    def _detect(self, batch: list[_Sample], output: DetectorOutput, threshold: float) -> list[Detections]:
        sizes = torch.tensor([sample.image.shape[:2] for sample in batch])  # (B, 2)
        found = postprocess(output, sizes, top_k=self.top_k, threshold=threshold)
        results = []
        for sample, (boxes_xyxy, scores, labels) in zip(batch, found, strict=True):
            height, width = sample.image.shape[:2]
            if self.clip:
                boxes_xyxy = boxes_xyxy.clamp(min=0).minimum(boxes_xyxy.new_tensor([width, height, width, height]))
            results.append(
                Detections(boxes_xyxy=boxes_xyxy, scores=scores, labels=labels, **self._about(sample, labels))
            )
        return results

    def _classify(self, batch: list[_Sample], images: Tensor, logits: Tensor) -> list[Classification]:
        # Ranked before the softmax, which rounds strong logits to one and the same score; the lowest label first.
        ranked = logits.float().sort(dim=1, descending=True, stable=True)
        scores, labels = ranked.values.softmax(dim=1)[:, : self.top].cpu(), ranked.indices[:, : self.top].cpu()
        maps = attention_maps.image_maps(self.model, images, method=self.attention).cpu() if self.attention else None
        results = []
        for index, sample in enumerate(batch):
            if not scores[index].isfinite().all():
                raise UserError(
                    f"the model's scores for {sample.path or 'an image'} are not finite; "
                    "look for diverged weights or a half-precision overflow"
                )
            one = Classification(scores=scores[index], labels=labels[index], **self._about(sample, labels[index]))
            if maps is not None:
                one.attention = attention_maps.to_image(
                    maps[index], image_size=one.image_size, preprocessing=self.metadata.preprocessing
                )
            results.append(one)
        return results

    def _about(self, sample: _Sample, labels: Tensor) -> dict[str, Any]:
        """What the results of detectors and classifiers have in common."""
        height, width = sample.image.shape[:2]
        return {
            "names": [self.metadata.class_map.names[label] for label in labels.tolist()],
            "image_size": (height, width),
            "path": sample.path,
            "image": sample.image if self.keep_images else None,
        }


def _load(source: str | Path) -> nn.Module:
    from vitdet import zoo

    return zoo.load_model(source)


def _checked_threshold(threshold: float) -> float:
    if not 0 <= threshold <= 1:
        raise UserError(f"threshold is {threshold}; scores are in [0, 1], and so must it be")
    return threshold
