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
