"""A data set of a few coloured rectangles and the smallest run on it: what end-to-end tests share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

CATEGORIES = {3: "red", 7: "blue"}  # ids with gaps, so that a label written for an id is seen
COLOURS = {3: (230, 30, 30), 7: (30, 60, 230)}
HEIGHT, WIDTH = 80, 96
FIRST_IMAGE = 11

Box = tuple[int, int, int, int]  # xywh in pixels


def draw_objects(rng: np.random.Generator, count: int, *, side: int = 36) -> list[Box]:
    """Boxes at random places, each about ``side`` pixels."""
    boxes = []
    for _ in range(count):
        width, height = (int(v) for v in rng.integers(max(3, side - 8), side + 1, size=2))
        boxes.append((int(rng.integers(WIDTH - width)), int(rng.integers(HEIGHT - height)), width, height))
    return boxes


def write_split(
    root: Path,
    split: str,
    counts: list[int],
    *,
    categories: dict[int, str] | None = None,
    side: int = 36,
    seed: int = 1,
) -> Path:
    """Write one split in COCO's layout: an image for each number of objects in ``counts``; returns the JSON's path."""
    categories = categories or CATEGORIES
    rng = np.random.default_rng(seed)
    (root / split).mkdir(parents=True, exist_ok=True)
    (root / "annotations").mkdir(exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for image_id, count in enumerate(counts, start=FIRST_IMAGE):
        canvas = np.full((HEIGHT, WIDTH, 3), 120, dtype=np.uint8)
        for number, (x, y, width, height) in enumerate(draw_objects(rng, count, side=side)):
            category = sorted(categories)[(image_id + number) % len(categories)]
            canvas[y : y + height, x : x + width] = COLOURS[category]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "category_id": category,
                    "bbox": [x, y, width, height],
                    "area": width * height,
                    "iscrowd": 0,
                }
            )
        name = f"{split}_{image_id}.png"
        Image.fromarray(canvas).save(root / split / name)
        images.append({"id": image_id, "file_name": name, "height": HEIGHT, "width": WIDTH})
    pairs = [{"id": identifier, "name": name} for identifier, name in categories.items()]
    path = root / "annotations" / f"instances_{split}.json"
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": pairs}))
    return path


def write_set(root: Path, **options: Any) -> Path:
    """Six training images and the same six for validation: what a tiny model can learn in a few seconds."""
    for split in ("train", "val"):
        write_split(root, split, [1, 2, 1, 1, 2, 1], **options)
    return root


def tiny_values(root: Path, output: Path) -> dict[str, Any]:
    """The values of a run's YAML: a model of 0.7 M parameters on 64 x 64 pixels, three steps an epoch."""
    return {
        "model": {
            "name": "rtdetr_nano",
            "overrides": {
                "encoder_width": 32, "encoder_hidden": 64, "width": 32, "heads": 4, "decoder_hidden": 64,
                "decoder_layers": 1, "num_queries": 20, "denoising_queries": 8,
            },
        },
        "data": {"root": str(root), "size": [64, 64], "workers": 0},
        "augment": {"hflip": 0.5},
        "optim": {"lr": 2.0e-3, "schedule": "flat_cosine", "warmup": 0.1},
        "train": {"epochs": 2, "batch": 2, "precision": "fp32", "device": "cpu"},
        "output": str(output),
    }  # fmt: skip


def write_config(path: Path, values: dict[str, Any]) -> Path:
    """The values as a YAML file."""
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path
