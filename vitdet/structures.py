"""The contracts between packages: what a batch of targets, a detector's output and a result look like."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitdet import boxes as box_ops
from vitdet.drawing import blend_heat, draw_boxes, draw_caption

if TYPE_CHECKING:
    import supervision

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of its training images, RGB on [0, 1]


@dataclass(frozen=True)
class ClassMap:
    """Category ids of a data set <-> contiguous labels 0…K-1 <-> names; label ``i`` is ``ids[i]``, ``names[i]``."""

    ids: tuple[int, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.names):
            raise ValueError(f"a class map needs as many names as ids, got {len(self.ids)} and {len(self.names)}")
        if len(set(self.ids)) != len(self.ids):
            raise ValueError(f"category ids must be unique, got {list(self.ids)}")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def distinct_names(self) -> list[str]:
        """The names; one that several classes share (ImageNet has two cranes) is followed by its id."""
        uses = Counter(self.names)
        pairs = zip(self.ids, self.names, strict=True)
        return [name if uses[name] == 1 else f"{name} ({category})" for category, name in pairs]

    @property
    def label_of_id(self) -> dict[int, int]:
        """Category id -> label."""
        return {category: label for label, category in enumerate(self.ids)}

    def to_dict(self) -> dict[str, list]:
        """Plain lists, as stored in checkpoints."""
        return {"ids": list(self.ids), "names": list(self.names)}

    @classmethod
    def from_dict(cls, values: dict[str, list]) -> ClassMap:
        """The inverse of :meth:`to_dict`."""
        return cls(ids=tuple(int(i) for i in values["ids"]), names=tuple(str(n) for n in values["names"]))


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes a model's input; it travels with the checkpoint.

    Attributes:
        size: (height, width) in pixels of the model's input.
        mean, std: per RGB channel, on the [0, 1] scale. The default leaves [0, 1] as it is, as RT-DETR does.
        interpolation: ``"bilinear"`` or ``"bicubic"``, antialiased.
        crop: None stretches the image to ``size``. A share in (0, 1] keeps its proportions: the image is resized until
            it just covers ``size / crop``, and the middle is cut out, as classifiers are evaluated.
        longest: keeps the proportions, too, and cuts nothing: the shorter side becomes ``size`` (then a square's), or
            less where the longer would exceed ``longest``. Images of a batch are padded to a common size (DETR).
    """

    size: tuple[int, int]
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    interpolation: str = "bilinear"
    crop: float | None = None
    longest: int | None = None

    def __post_init__(self) -> None:
        if self.longest is not None and (
            self.crop is not None or self.size[0] != self.size[1] or self.longest < self.size[0]
        ):
            raise ValueError(
                "images that keep their proportions have a square size, its side at most longest, and no crop; "
                f"got size {list(self.size)}, longest {self.longest}, crop {self.crop}"
            )
        if self.interpolation not in ("bilinear", "bicubic"):
            raise ValueError(f"interpolation must be 'bilinear' or 'bicubic', got {self.interpolation!r}")
        if self.crop is not None and not 0 < self.crop <= 1:
            raise ValueError(f"crop is the share of the image that is kept, in (0, 1], got {self.crop}")

    def normalize(self, images: Tensor, sizes: Tensor | None = None) -> Tensor:
        """uint8 ``(B, 3, h, w)`` RGB to the float tensor the model takes, channels last: convolutions are faster so.

        What lies beyond ``sizes``, (B, 2) heights and widths on the same device, is padding and becomes 0.
        """
        images = images.to(torch.float32, memory_format=torch.channels_last, copy=True)
        if self.mean == (0.0, 0.0, 0.0) and self.std == (1.0, 1.0, 1.0):
            images.div_(255)
        else:
            # In place and in two passes: on a CPU this takes a third of the time.
            mean, std = (images.new_tensor(values).mul_(255).view(3, 1, 1) for values in (self.mean, self.std))
            images.sub_(mean).div_(std)
        if sizes is not None:
            for axis in (2, 3):
                place = torch.arange(images.shape[axis], device=images.device)
                inside = place < sizes[:, axis - 2, None]  # (B, h), then (B, w)
                images.mul_(inside[:, None, :, None] if axis == 2 else inside[:, None, None, :])
        return images

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as stored in checkpoints."""
        return {
            "size": list(self.size),
            "mean": list(self.mean),
            "std": list(self.std),
            "interpolation": self.interpolation,
            "crop": self.crop,
            **({} if self.longest is None else {"longest": self.longest}),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Preprocessing:
        """The inverse of :meth:`to_dict`."""
        height, width = values["size"]
        return cls(
            size=(int(height), int(width)),
            mean=tuple(values["mean"]),
            std=tuple(values["std"]),
            interpolation=str(values.get("interpolation", "bilinear")),
            crop=None if values.get("crop") is None else float(values["crop"]),
            longest=None if values.get("longest") is None else int(values["longest"]),
        )


@dataclass
class Targets:
    """Ground truth of a batch, padded to the largest number of objects T, which may be 0.

    Attributes:
        boxes: (B, T, 4) ``cxcywh`` in [0, 1]; padding is 0.
        labels: (B, T) int64 in 0…K-1; padding is 0.
        valid: (B, T) bool: True on the first T_i of row i, False on the padding after them.
    """

    boxes: Tensor
    labels: Tensor
    valid: Tensor

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Targets:
        """The same targets on another device."""
        return Targets(*(t.to(device, non_blocking=non_blocking) for t in (self.boxes, self.labels, self.valid)))

    def pin_memory(self) -> Targets:
        """In page-locked memory, from which a copy to the GPU does not wait; the DataLoader calls this."""
        return Targets(self.boxes.pin_memory(), self.labels.pin_memory(), self.valid.pin_memory())

    def __len__(self) -> int:
        return self.labels.shape[0]

    @classmethod
    def from_lists(cls, boxes: list[Tensor], labels: list[Tensor]) -> Targets:
        """One (T_i, 4) ``cxcywh`` tensor and one (T_i,) tensor an image, padded to the largest T_i."""
        most = max((len(item) for item in labels), default=0)
        padded = cls(
            boxes=torch.zeros(len(labels), most, 4),
            labels=torch.zeros(len(labels), most, dtype=torch.int64),
            valid=torch.zeros(len(labels), most, dtype=torch.bool),
        )
        for row, (image_boxes, image_labels) in enumerate(zip(boxes, labels, strict=True)):
            count = len(image_labels)
            padded.boxes[row, :count] = image_boxes
            padded.labels[row, :count] = image_labels
            padded.valid[row, :count] = True
        return padded


@dataclass
class ImageTargets:
    """Ground truth of a batch of whole images.

    Attributes:
        probabilities: (B, K) float32, rows summing to 1: one-hot, or mixed by mixup and cutmix.
        teacher: (B,) int64, the classes that a teacher sees in the images, for distillation; None without one.
    """

    probabilities: Tensor
    teacher: Tensor | None = None

    @classmethod
    def from_labels(cls, labels: Tensor, num_classes: int) -> ImageTargets:
        """One-hot rows of (B,) int64 labels in 0…K-1."""
        return cls(torch.nn.functional.one_hot(labels, num_classes).to(torch.float32))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ImageTargets:
        """The same targets on another device."""
        teacher = None if self.teacher is None else self.teacher.to(device, non_blocking=non_blocking)
        return ImageTargets(self.probabilities.to(device, non_blocking=non_blocking), teacher)

    def pin_memory(self) -> ImageTargets:
        """In page-locked memory, from which a copy to the GPU does not wait; the DataLoader calls this."""
        teacher = None if self.teacher is None else self.teacher.pin_memory()
        return ImageTargets(self.probabilities.pin_memory(), teacher)

    def __len__(self) -> int:
        return self.probabilities.shape[0]


@dataclass
class EdgeDistributions:
    """Distributions of the four edges of boxes (D-FINE, arXiv 2410.13842, section 4.1).

    Attributes:
        logits: (B, Q, 4, N + 1), of the left, top, right and bottom edge over the bins.
        reference: (B, Q, 4) ``cxcywh`` in [0, 1], without gradient: the boxes from whose edges the bins are told.
        bins: (N + 1,) rising distances outwards, in the reference box's size over ``scale``. scale: (1,).
        teacher: (B, Q, 4, N + 1) logits to learn from; None where there are none.
        confidence: (B, Q) in [0, 1], how much what the teacher says of unmatched queries weighs.
    """

    logits: Tensor
    reference: Tensor
    bins: Tensor
    scale: Tensor
    teacher: Tensor | None = None
    confidence: Tensor | None = None

    def of(self, queries: slice) -> EdgeDistributions:
        """Those of some of the queries."""
        teacher = None if self.teacher is None else self.teacher[:, queries]
        confidence = None if self.confidence is None else self.confidence[:, queries]
        logits, reference = self.logits[:, queries], self.reference[:, queries]
        return EdgeDistributions(logits, reference, self.bins, self.scale, teacher, confidence)


@dataclass
class SupervisedOutput:
    """One prediction that the criterion supervises: logits as of the output, boxes (B, Q, 4) ``cxcywh`` in [0, 1].

    ``matching`` says how its queries find their targets:
    ``"one_to_one"`` (Hungarian), ``"one_to_many"`` (several queries a target), or ``"given"``: then ``target_index``
    (B, Q) holds each query's target and -1 where it is background (denoising queries know theirs).
    ``groups`` is the number of copies of each target that the queries stand for; the loss is divided by it.
    ``edges`` are the distributions that the boxes were read off, if they were.
    """

    logits: Tensor
    boxes: Tensor
    matching: str = "one_to_one"
    target_index: Tensor | None = None
    groups: int = 1
    edges: EdgeDistributions | None = None

    def of(self, queries: slice) -> SupervisedOutput:
        """The predictions of some of the queries."""
        edges = None if self.edges is None else self.edges.of(queries)
        index = None if self.target_index is None else self.target_index[:, queries]
        logits, boxes = self.logits[:, queries], self.boxes[:, queries]
        return SupervisedOutput(logits, boxes, self.matching, index, self.groups, edges)


@dataclass
class DetectorOutput:
    """What every detector returns.

    Attributes:
        logits: (B, Q, K), before the sigmoid; with ``no_object`` (B, Q, K + 1), before the softmax.
        boxes: (B, Q, 4) ``cxcywh`` in [0, 1].
        supervised: name -> prediction, in training only: the final one and all auxiliary ones (``decoder_0`` …,
            ``encoder``, ``denoising_0`` …). The criterion is one loop over it.
        no_object: whether the last logit says that there is no object, and the classes exclude one another (DETR).
    """

    logits: Tensor
    boxes: Tensor
    supervised: dict[str, SupervisedOutput] = field(default_factory=dict)
    no_object: bool = False

    @property
    def num_classes(self) -> int:
        """K."""
        return self.logits.shape[-1] - self.no_object


def coco_rows(
    boxes_xyxy: Tensor, scores: Tensor, labels: Tensor, *, image_id: int, class_map: ClassMap
) -> list[dict[str, Any]]:
    """One image's (N, 4) boxes, (N,) scores and labels as COCO results: image_id, category_id, bbox (xywh), score."""
    rows = zip(labels.tolist(), box_ops.xyxy_to_xywh(boxes_xyxy).tolist(), scores.tolist(), strict=True)
    return [
        {"image_id": image_id, "category_id": class_map.ids[label], "bbox": box, "score": score}
        for label, box, score in rows
    ]


@dataclass
class Detections:
    """The objects found in one image, best first.

    Attributes:
        boxes_xyxy: (N, 4) float32 CPU tensor, pixels of the original image.
        scores: (N,) float32 in [0, 1].
        labels: (N,) int64, contiguous.
        names: the N class names.
        image_size: (height, width) of the original image.
        path: the file it came from, if any.
        image: (height, width, 3) uint8 RGB, kept for drawing, if any.
    """

    boxes_xyxy: Tensor
    scores: Tensor
    labels: Tensor
    names: list[str]
    image_size: tuple[int, int]
    path: Path | None = None
    image: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.to_dict()["detections"])

    def to_dict(self) -> dict[str, Any]:
        """Plain values: ``path``, ``height``, ``width`` and a list ``detections`` of name, label, score, box."""
        rows = zip(self.names, self.labels.tolist(), self.scores.tolist(), self.boxes_xyxy.tolist(), strict=True)
        return {
            "path": str(self.path) if self.path else None,
            "height": self.image_size[0],
            "width": self.image_size[1],
            "detections": [{"name": n, "label": k, "score": s, "box_xyxy": b} for n, k, s, b in rows],
        }

    def to_coco(self, image_id: int, class_map: ClassMap) -> list[dict[str, Any]]:
        """COCO result rows, see :func:`coco_rows`."""
        return coco_rows(self.boxes_xyxy, self.scores, self.labels, image_id=image_id, class_map=class_map)

    def to_supervision(self) -> supervision.Detections:
        """The same as a ``supervision.Detections``, with the names under ``data["class_name"]``."""
        import supervision

        return supervision.Detections(
            xyxy=self.boxes_xyxy.numpy().astype(np.float32).reshape(-1, 4),
            confidence=self.scores.numpy(),
            class_id=self.labels.numpy().astype(int),
            data={"class_name": np.array(self.names, dtype=str)},
        )

    def plot(self) -> np.ndarray:
        """The image with boxes, names and scores drawn: (height, width, 3) uint8 RGB."""
        captions = [f"{name} {score:.2f}" for name, score in zip(self.names, self.scores.tolist(), strict=True)]
        return draw_boxes(_canvas(self), self.boxes_xyxy.numpy(), self.labels.numpy(), captions)

    def save(self, path: str | Path) -> None:
        """Write the drawn picture, or with a ``.json`` name the values of :meth:`to_dict`."""
        _save(self, path)


@dataclass
class Classification:
    """The classes of one image, best first.

    Attributes:
        scores: (N,) float32 CPU tensor, probabilities of the N best classes.
        labels: (N,) int64, contiguous.
        names: the N class names.
        image_size: (height, width) of the original image.
        path: the file it came from, if any.
        image: (height, width, 3) uint8 RGB, kept for drawing, if any.
        attention: (height, width) float32 in [0, 1], where the model looked, if asked for.
    """

    scores: Tensor
    labels: Tensor
    names: list[str]
    image_size: tuple[int, int]
    path: Path | None = None
    image: np.ndarray | None = None
    attention: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.to_dict()["classes"])

    @property
    def name(self) -> str:
        """The best class."""
        return self.names[0]

    @property
    def score(self) -> float:
        """Its probability."""
        return float(self.scores[0])

    def to_dict(self) -> dict[str, Any]:
        """Plain values: ``path``, ``height``, ``width`` and a list ``classes`` of name, label, score."""
        rows = zip(self.names, self.labels.tolist(), self.scores.tolist(), strict=True)
        return {
            "path": str(self.path) if self.path else None,
            "height": self.image_size[0],
            "width": self.image_size[1],
            "classes": [{"name": n, "label": k, "score": s} for n, k, s in rows],
        }

    def plot(self) -> np.ndarray:
        """The image, under its attention if there is one, with names and scores: (height, width, 3) uint8 RGB."""
        image = _canvas(self)
        if self.attention is not None:
            image = blend_heat(image, self.attention)
        return draw_caption(image, [(n, f"{s:.2f}") for n, s in zip(self.names, self.scores.tolist(), strict=True)])

    def save(self, path: str | Path) -> None:
        """Write the drawn picture, or with a ``.json`` name the values of :meth:`to_dict`."""
        _save(self, path)


def _canvas(result: Detections | Classification) -> np.ndarray:
    """The result's image, or a white page of its size."""
    if result.image is not None:
        return result.image
    return np.full((*result.image_size, 3), 255, dtype=np.uint8)


def _save(result: Detections | Classification, path: str | Path) -> None:
    """A result as picture or as JSON, by the suffix; JSON knows no NaN, and a ValueError says so."""
    path = Path(path)
    if path.suffix.lower() == ".json":
        path.write_text(json.dumps(result.to_dict(), allow_nan=False))
        return
    from PIL import Image

    Image.fromarray(result.plot()).save(path, quality=95)


@dataclass
class ModelMetadata:
    """What a weights file says about itself; a loaded model carries it as ``.metadata``.

    Attributes:
        name: of the zoo's builder. arguments: the builder's, ``num_classes`` included.
        class_map, preprocessing: what the model was trained with.
        metrics: measured when the file was written. version: of the package that wrote it.
    """

    name: str
    arguments: dict[str, Any]
    class_map: ClassMap
    preprocessing: Preprocessing
    metrics: dict[str, float] = field(default_factory=dict)
    version: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a file's header."""
        return {
            "name": self.name,
            "arguments": self.arguments,
            "class_map": self.class_map.to_dict(),
            "preprocessing": self.preprocessing.to_dict(),
            "metrics": self.metrics,
            "version": self.version,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelMetadata:
        """The inverse of :meth:`to_dict`."""
        return cls(
            name=str(values["name"]),
            arguments=dict(values["arguments"]),
            class_map=ClassMap.from_dict(values["class_map"]),
            preprocessing=Preprocessing.from_dict(values["preprocessing"]),
            metrics=dict(values.get("metrics", {})),
            version=str(values.get("version", "")),
        )
