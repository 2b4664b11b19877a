"""``vitdet convert``: a trained detector and a trained classifier, for other programs and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.conftest import Run
from vitdet.cli import main
from vitdet.engine.checkpoint import save_weights
from vitdet.structures import ClassMap, ModelMetadata, Preprocessing
from vitdet.zoo import create_model


@pytest.fixture
def detector(tmp_path: Path) -> Path:
    metadata = ModelMetadata("dfine_n", {"num_classes": 2}, ClassMap((3, 7), ("red", "blue")), Preprocessing((64, 64)))
    save_weights(tmp_path / "ours.safetensors", create_model("dfine_n", num_classes=2), metadata)
    return tmp_path / "ours.safetensors"


def test_there_and_back(detector: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, back = tmp_path / "theirs", tmp_path / "back.safetensors"
    assert main(["convert", str(detector), str(folder)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{folder}\n"
    assert captured.err == "category ids are not part of that layout: its classes are counted from 0\n"
    assert main(["convert", str(folder), str(back)]) == 0
    assert capsys.readouterr().out == f"{back}\n"
    first, last = load_file(detector), load_file(back)
    assert first.keys() == last.keys()
    assert all(torch.equal(first[name], last[name]) for name in first)
    assert main(["convert", str(folder), str(back), "--overwrite"]) == 0


def test_a_trained_classifier_for_timm(image_run: Run, tmp_path: Path, fails: Callable[..., str]) -> None:
    """The run's ViT is narrower than any of timm's, which is said."""
    sentence = fails("convert", image_run.weights, tmp_path / "theirs")
    assert "is not in timm's layout; keep the .safetensors of ours" in sentence
    assert not (tmp_path / "theirs").exists()


def test_mistakes(detector: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    arguments = {"num_classes": 1, "encoder_width": 32, "encoder_hidden": 32, "width": 32, "decoder_layers": 1}
    nano = ModelMetadata("rtdetr_nano", arguments, ClassMap((0,), ("red",)), Preprocessing((64, 64)))
    save_weights(tmp_path / "nano.safetensors", create_model("rtdetr_nano", **arguments), nano)
    assert fails("convert", detector, tmp_path / "a.pth").endswith("ends in .safetensors; pass one of the two")
    assert fails("convert", detector, detector) == f"there is something at {detector} already; pass another name, or " \
        "--overwrite"  # fmt: skip
    assert fails("convert", tmp_path / "nano.safetensors", tmp_path / "theirs").startswith(
        "transformers' rt_detr has no "
    )
    assert fails("convert", tmp_path / "none", tmp_path / "theirs").startswith("there is no ")
    assert not (tmp_path / "theirs").exists()
