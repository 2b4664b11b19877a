"""The contracts between packages: what a batch of targets, a detector's output and a model's description look like."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
        norm = (*self.mean, *self.std)
        if len(self.mean) != 3 or len(self.std) != 3 or not all(isinstance(one, int | float) for one in norm):
            raise ValueError(f"mean and std are three numbers each, got {self.mean!r} and {self.std!r}")
        if not all(math.isfinite(one) for one in norm) or min(self.std) <= 0:
            raise ValueError(f"mean and std must be finite and std above 0, got {self.mean!r} and {self.std!r}")
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
