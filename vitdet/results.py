"""What a model found in one image: detections or classes, and how they are written and drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from vitdet import boxes as box_ops
from vitdet.drawing import blend_heat, draw_boxes, draw_caption
from vitdet.structures import ClassMap

if TYPE_CHECKING:
    import supervision


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
