"""An image folder of striped and coloured squares and the smallest classifier on it: what end-to-end tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CLASSES = ("blue", "red", "stripes")  # sorted, as labels are given
SIDE = 32
PER_SPLIT = {"train": 12, "val": 4}
TINY_VIT = {"patch": 8, "width": 32, "layers": 2, "heads": 2, "hidden": 64}


def draw_image(kind: str, rng: np.random.Generator, *, side: int = SIDE) -> np.ndarray:
    """One picture (side, side, 3): red or blue all over, or stripes of both; with noise."""
    colours = np.array([(200, 40, 40), (40, 60, 200)], dtype=np.float64)
    shade = colours + rng.uniform(-30, 30, size=(2, 1))
    columns = (np.arange(side) + rng.integers(8)) // 4 % 2
    chosen = {"red": np.zeros(side, dtype=int), "blue": np.ones(side, dtype=int)}.get(kind, columns)
    picture = np.broadcast_to(shade[chosen], (side, side, 3)) + rng.normal(0, 10, size=(side, side, 3))
    return np.clip(picture, 0, 255).astype(np.uint8)


def write_images(
    root: Path, *, classes: tuple[str, ...] = CLASSES, per_split: dict[str, int] | None = None, side: int = SIDE
) -> Path:
    """``SPLIT/CLASS/NUMBER.png``; the classes look like red, blue and stripes in the order of ``CLASSES``."""
    rng = np.random.default_rng(5)
    for split, count in (per_split or PER_SPLIT).items():
        for number, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for image in range(count):
                picture = draw_image(CLASSES[number % len(CLASSES)], rng, side=side)
                Image.fromarray(picture).save(folder / f"{image:02}.png")
    return root


def tiny_values(root: Path, output: Path) -> dict[str, Any]:
    """The values of a run's YAML: a ViT of 20,000 parameters on 16 patches, three steps an epoch."""
    return {
        "task": "classification",
        "model": {"name": "vit_tiny_patch16_224", "overrides": dict(TINY_VIT)},
        "data": {"root": str(root), "size": [SIDE, SIDE], "workers": 0, "crop": 1.0},
        "augment": {"scale": [0.5, 1.0]},
        "optim": {"lr": 3.0e-3, "warmup": 0.1, "clip_norm": 1.0},
        "train": {"epochs": 2, "batch": 12, "precision": "fp32", "device": "cpu"},
        "output": str(output),
    }


def changed(values: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """The values with some keys of some sections replaced."""
    result = dict(values)
    for name, change in sections.items():
        result[name] = {**result.get(name, {}), **change} if isinstance(change, dict) else change
    return result
