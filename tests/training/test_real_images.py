"""Trainings on real images to a figure, through the same configuration, loader and trainer as any run."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitdet.build import evaluate_source, run_training
from vitdet.config import load_config

pytestmark = pytest.mark.slow


def test_blood_cells(shared_data: Path, tmp_path: Path) -> None:
    root = shared_data / "detection" / "bccd"
    config = load_config("rtdetr_nano_bccd.yaml", [f"data.root={root}", f"output={tmp_path / 'run'}"])
    run_training(config)
    metrics = evaluate_source(tmp_path / "run" / "best.safetensors", root=root, workers=0)
    print({key: value for key, value in metrics.items() if key.startswith("A")})
    assert metrics["AP50"] >= 0.80


def test_blood_cells_from_published_weights(shared_data: Path, tmp_path: Path) -> None:
    """DEIMv2-Atto's file for inference is a better start than none, in a third of the time: the README's command."""
    root = shared_data / "detection" / "bccd"
    weights = shared_data / "weights" / "deimv2" / "deimv2_atto_coco_fused.safetensors"
    config = load_config(
        "finetune_detector.yaml",
        [
            f"data.root={root}", "model.name=deimv2_atto", f"model.weights={weights}", "data.size=[320,320]",
            "loss.classification=mal", "optim.lr=1e-3", "optim.backbone_lr=5e-4", "optim.clip_norm=1.0",
            "train.epochs=24", "eval.every=6", "data.workers=1", "data.cache=true", "augment.vflip=0.5",
            "augment.zoom_out=0.2", "augment.iou_crop=0.5", f"output={tmp_path / 'run'}",
        ],
    )  # fmt: skip
    run_training(config)
    metrics = evaluate_source(tmp_path / "run" / "best.safetensors", root=root, workers=0)
    print({key: value for key, value in metrics.items() if key.startswith("A")})
    assert metrics["AP50"] >= 0.85
