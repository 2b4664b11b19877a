"""Trainings on real images to a figure, through the same configuration, loader and trainer as any run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from vitdet.build import evaluate_source, run_training
from vitdet.config import load_config

pytestmark = pytest.mark.slow


def eight_images(source: Path, root: Path) -> Path:
    """The first eight images of a COCO split with 1 to 8 ordinary objects each, as both splits of a new data set."""
    given = json.loads((source / "instances.json").read_text())
    by_image: dict[int, list[dict]] = {}
    for annotation in given["annotations"]:
        by_image.setdefault(annotation["image_id"], []).append(annotation)
    chosen = []
    for image in given["images"]:
        objects = by_image.get(image["id"], [])
        if 1 <= len(objects) <= 8 and not any(one["iscrowd"] for one in objects):
            chosen.append(image)
    chosen = chosen[:8]
    assert len(chosen) == 8
    ids = {image["id"] for image in chosen}
    kept = [one for one in given["annotations"] if one["image_id"] in ids]
    (root / "annotations").mkdir(parents=True)
    for split in ("train", "val"):
        (root / split).mkdir()
        for image in chosen:
            shutil.copy(next(source.rglob(image["file_name"])), root / split)
        values = {"images": chosen, "annotations": kept, "categories": given["categories"]}
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(values))
    return root


def test_overfits_eight_real_images(shared_data: Path, tmp_path: Path) -> None:
    root = eight_images(shared_data / "detection" / "coco_mini" / "train", tmp_path / "eight")
    values = {
        "model": {"name": "rtdetr_nano"},
        "data": {"root": str(root), "size": [320, 320], "workers": 0, "cache": True},
        "optim": {"lr": 1e-3, "weight_decay": 0.0, "clip_norm": 1.0},
        "train": {"epochs": 300, "batch": 8},
        "eval": {"every": 100},
        "output": str(tmp_path / "run"),
    }
    (tmp_path / "overfit.yaml").write_text(yaml.safe_dump(values))
    run_training(load_config(tmp_path / "overfit.yaml"))
    metrics = evaluate_source(tmp_path / "run" / "best.safetensors", root=root, workers=0)
    print({key: value for key, value in metrics.items() if key.startswith("A")})
    assert metrics["AP"] > 0.95


def test_blood_cells(shared_data: Path, tmp_path: Path) -> None:
    root = shared_data / "detection" / "bccd"
    config = load_config("rtdetr_nano_bccd.yaml", [f"data.root={root}", f"output={tmp_path / 'run'}"])
    run_training(config)
    metrics = evaluate_source(tmp_path / "run" / "best.safetensors", root=root, workers=0)
    print({key: value for key, value in metrics.items() if key.startswith("A")})
    assert metrics["AP50"] >= 0.80
