"""What a data set is once it has been read, whichever format it came in."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vitdet.errors import some
from vitdet.structures import ClassMap


@dataclass(frozen=True, eq=False)
class ImageRecord:
    """One image and its T objects, as annotated: nothing is clipped or left out here.

    Attributes:
        path: the image file.
        image_id: unique within the data set; the id under which results are written.
        size: (height, width) in pixels of the upright image (EXIF orientation applied).
        boxes: (T, 4) float64 ``xyxy`` pixels.
        labels: (T,) int64, contiguous labels of the data set's class map.
        crowd: (T,) bool, regions that hold many objects: never a training target, ignored in evaluation.
        areas: (T,) float64, square pixels; the area of the mask where the format knows it, else of the box.
        annotation_ids: (T,) int64, positive and unique within the data set.
    """

    path: Path
    image_id: int
    size: tuple[int, int]
    boxes: np.ndarray
    labels: np.ndarray
    crowd: np.ndarray
    areas: np.ndarray
    annotation_ids: np.ndarray

    def training_targets(self) -> tuple[np.ndarray, np.ndarray]:
        """The boxes to learn from: (T', 4) float32 ``xyxy`` clipped to the image, and their (T',) labels.

        Crowd regions and boxes that have no area inside the image are left out.
        """
        height, width = self.size
        boxes = np.clip(self.boxes, 0.0, np.array([width, height, width, height], dtype=np.float64))
        keep = (boxes[:, 2:] > boxes[:, :2]).all(axis=1) & ~self.crowd
        return boxes[keep].astype(np.float32), self.labels[keep]


@dataclass(frozen=True, eq=False)
class DetectionSet:
    """One split of a data set.

    Attributes:
        name: the recognised format, ``"COCO JSON"``, ``"YOLO"``, ``"Pascal VOC"`` or ``"CSV"``.
        root: the folder (or file) it was read from.
        split: the name of the split.
        class_map: category ids, labels and names.
        records: the images in the order of the annotation file.
        notes: one-line warnings about annotations that training will leave out or clip.
    """

    name: str
    root: Path
    split: str
    class_map: ClassMap
    records: list[ImageRecord]
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.records)

    def to_coco(self) -> dict[str, Any]:
        """COCO ground truth in original pixels, with the data set's own category ids; crowd regions included."""
        images, annotations = [], []
        for record in self.records:
            height, width = record.size
            images.append({"id": record.image_id, "file_name": record.path.name, "height": height, "width": width})
            sizes = record.boxes[:, 2:] - record.boxes[:, :2]
            columns = (record.annotation_ids, record.labels, record.crowd, record.areas, record.boxes[:, :2], sizes)
            for number, label, crowd, area, corner, size in zip(*(c.tolist() for c in columns), strict=True):
                annotations.append(
                    {
                        "id": number,
                        "image_id": record.image_id,
                        "category_id": self.class_map.ids[label],
                        "bbox": corner + size,
                        "area": area,
                        "iscrowd": int(crowd),
                    }
                )
        pairs = zip(self.class_map.ids, self.class_map.names, strict=True)
        categories = [{"id": category, "name": name} for category, name in pairs]
        return {"info": {}, "images": images, "annotations": annotations, "categories": categories}


@dataclass(frozen=True, eq=False)
class ClassificationSet:
    """One split of a data set whose images each show one class.

    Attributes:
        name: the recognised format, ``"image folder"``.
        root: the folder it was read from.
        split: the name of the split.
        class_map: ids, labels and names.
        paths: the N image files, in the order of the classes.
        labels: (N,) int64, contiguous labels of the class map.
        notes: one-line warnings.
    """

    name: str
    root: Path
    split: str
    class_map: ClassMap
    paths: list[Path]
    labels: np.ndarray
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.paths)


def split_aliases(split: str) -> tuple[str, ...]:
    """The names under which people keep a split, its own first."""
    return {"val": ("val", "valid", "validation"), "train": ("train", "training")}.get(split, (split,))


def training_notes(records: list[ImageRecord]) -> list[str]:
    """One line for each kind of annotation that training changes: boxes without area, boxes beyond the image."""
    empty: list[str] = []
    outside: list[str] = []
    for record in records:
        if not len(record.boxes):
            continue
        height, width = record.size
        flat = int((record.boxes[:, 2:] <= record.boxes[:, :2]).any(axis=1).sum())
        low, high = record.boxes[:, :2], record.boxes[:, 2:]
        # Half a pixel of rounding is how annotation tools write a box that touches the border.
        over = int(((low < -0.5) | (high > np.array([width, height]) + 0.5)).any(axis=1).sum())
        empty += [record.path.name] * flat
        outside += [record.path.name] * over
    notes = []
    if empty:
        verb = "es of zero area are" if len(empty) > 1 else " of zero area is"
        notes.append(f"{len(empty)} box{verb} left out of training: {some(list(dict.fromkeys(empty)))}")
    if outside:
        verb = "es reach beyond the image and are" if len(outside) > 1 else " reaches beyond the image and is"
        notes.append(f"{len(outside)} box{verb} clipped for training: {some(list(dict.fromkeys(outside)))}")
    return notes
