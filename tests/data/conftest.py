"""Small data sets to break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitdet.data.records import DetectionSet, ImageRecord
from vitdet.structures import ClassMap


@pytest.fixture
def write_image() -> Callable[..., Path]:
    """Writes a random picture of (height, width) to a path."""

    def write(path: Path, size: tuple[int, int] = (30, 40), seed: int = 0) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(picture).save(path)
        return path

    return write


@pytest.fixture
def coco_content() -> dict[str, Any]:
    """Two images (30 x 40), three annotations, categories with a gap."""
    return {
        "images": [
            {"id": 7, "file_name": "a.png", "height": 30, "width": 40},
            {"id": 3, "file_name": "b.png", "height": 30, "width": 40},
        ],
        "annotations": [
            {"id": 11, "image_id": 7, "category_id": 5, "bbox": [1, 2, 10, 20], "area": 150.5, "iscrowd": 0},
            {"id": 12, "image_id": 7, "category_id": 2, "bbox": [0, 0, 5, 5], "area": 25, "iscrowd": 1},
            {"id": 13, "image_id": 3, "category_id": 2, "bbox": [30.5, 20, 20, 5]},
        ],
        "categories": [{"id": 5, "name": "cat"}, {"id": 2, "name": "dog"}],
    }


@pytest.fixture
def make_set(tmp_path: Path, write_image: Callable[..., Path]) -> Callable[..., DetectionSet]:
    """A set of random pictures of varied size, each with some boxes of 3 classes."""

    def make(count: int = 6, boxes: int = 3) -> DetectionSet:
        rng = np.random.default_rng(5)
        records = []
        for index in range(count):
            height, width = 40 + 4 * index, 60 - 2 * index
            low = rng.uniform(0, 0.5, (boxes, 2)) * [width, height]
            high = low + rng.uniform(0.2, 0.5, (boxes, 2)) * [width, height]
            records.append(
                ImageRecord(
                    path=write_image(tmp_path / "pictures" / f"{index}.png", (height, width), seed=index),
                    image_id=100 + index,
                    size=(height, width),
                    boxes=np.concatenate([low, high], axis=1),
                    labels=rng.integers(0, 3, boxes),
                    crowd=np.zeros(boxes, dtype=bool),
                    areas=(high - low).prod(axis=1),
                    annotation_ids=np.arange(boxes) + 1 + index * boxes,
                )
            )
        class_map = ClassMap(ids=(1, 2, 3), names=("a", "b", "c"))
        return DetectionSet("COCO JSON", tmp_path, "train", class_map, records)

    return make
