"""Every family of detectors learns eight images by heart, through the recipe for fine-tuning and the one trainer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from vitdet.build import evaluate_source, run_training
from vitdet.config import AnyRunConfig, load_config

pytestmark = pytest.mark.slow


class Case(NamedTuple):
    """A small model of a family, and what of the recipe suits its learning by heart.

    Attributes:
        model, numbers: its name and arguments. side: of the square images. epochs: steps, too, of all eight images.
        lr: of all parts. options: further keys of the run.
    """

    model: str
    numbers: dict[str, Any]
    side: int
    epochs: int
    lr: float
    options: tuple[str, ...] = ()


# Narrow encoders and decoders of two layers, as rtdetr_nano has them.
NARROW = {
    "encoder_width": 128, "encoder_hidden": 256, "encoder_blocks": 1, "width": 128, "heads": 4, "decoder_hidden": 256,
    "decoder_layers": 2, "num_queries": 100, "denoising_queries": 50,
}  # fmt: skip
SMALL_DETR = {
    "backbone": "resnet18_vd", "width": 128, "heads": 4, "hidden": 256, "encoder_layers": 2, "decoder_layers": 3,
    "num_queries": 25, "dropout": 0.0,
}  # fmt: skip

CASES = {
    "detr": Case("detr_r50", SMALL_DETR, 256, 900, 3e-4, ("eval.top_k=100",)),
    "rtdetr": Case("rtdetr_nano", {}, 320, 300, 1e-3),
    "rtdetr_on_a_vit": Case("rtdetr_r18", {**NARROW, "backbone": "vit_tiny_patch16_224"}, 224, 400, 5e-4),
    "rtdetrv2": Case("rtdetrv2_r18", {**NARROW, "backbone": "timm/resnet10t", "points": [2, 4, 2]}, 256, 300, 1e-3),
    "dfine": Case("dfine_n", {"decoder_layers": 2, "num_queries": 100}, 256, 300, 1e-3, ("loss.union=true",)),
    "deimv2": Case(
        "deimv2_atto", {}, 320, 400, 2e-3,
        ("loss.classification=mal", "loss.fgl=0", "loss.ddf=0", "loss.match_quality_from=0.9"),
    ),
    "deimv2_on_a_vit": Case(
        "deimv2_s", {"decoder_layers": 2, "num_queries": 100}, 192, 400, 5e-4, ("loss.classification=mal",)
    ),
}  # fmt: skip


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


def configure(case: Case, root: Path, output: Path) -> AnyRunConfig:
    """The recipe for fine-tuning, from random weights, on images as they are."""
    numbers = json.dumps(case.numbers)
    return load_config(
        "finetune_detector.yaml",
        [
            f"model.name={case.model}", f"model.overrides={numbers}", "model.weights=null", f"data.root={root}",
            f"data.size=[{case.side},{case.side}]", "data.workers=0", "data.cache=true", "augment.photometric=0",
            "augment.zoom_out=0", "augment.iou_crop=0", "augment.hflip=0", f"optim.lr={case.lr}",
            f"optim.backbone_lr={case.lr}", "optim.weight_decay=0", "optim.clip_norm=1.0",
            f"train.epochs={case.epochs}", "eval.every=100", f"output={output}", *case.options,
        ],
    )  # fmt: skip


@pytest.mark.parametrize("family", CASES)
def test_overfits_eight_real_images(family: str, shared_data: Path, tmp_path: Path) -> None:
    root = eight_images(shared_data / "detection" / "coco_mini" / "train", tmp_path / "eight")
    run_training(configure(CASES[family], root, tmp_path / "run"))
    metrics = evaluate_source(tmp_path / "run" / "best.safetensors", root=root, workers=0)
    print(family, {key: value for key, value in metrics.items() if key.startswith("A")})
    assert metrics["AP"] > 0.9
