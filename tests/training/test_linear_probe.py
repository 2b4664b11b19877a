"""Real weights that somebody else trained, as features: a linear classifier on them, on real photographs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import RidgeClassifierCV

from vitdet import load_model
from vitdet.data.formats import read_classification_set
from vitdet.data.images import decode_image
from vitdet.data.transforms import to_input

pytestmark = pytest.mark.slow


@torch.inference_mode()
def features(model: Any, root: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """The features (N, C) of each image, which a model without classes gives, and the labels (N,)."""
    data = read_classification_set(root, split)
    preprocessing = model.metadata.preprocessing
    found = []
    for start in range(0, len(data), 20):
        pixels = [torch.from_numpy(to_input(decode_image(p), preprocessing)) for p in data.paths[start : start + 20]]
        found.append(model(preprocessing.normalize(torch.stack(pixels).permute(0, 3, 1, 2))))
    return torch.cat(found).numpy(), data.labels


def test_a_linear_probe_on_dinov2(shared_data: Path) -> None:
    """Its strength is chosen by cross-validation on the training images alone."""
    weights = next((shared_data / "weights" / "dinov2_vits14").glob("*.safetensors"))
    model = load_model(weights, model="vit_small_patch14_dinov2", image_size=(224, 224))
    root = shared_data / "classification" / "imagenette224_small"
    (x, y), (val_x, val_y) = features(model, root, "train"), features(model, root, "val")
    mean, std = x.mean(axis=0), x.std(axis=0)
    probe = RidgeClassifierCV(alphas=np.logspace(0, 4, 9)).fit((x - mean) / std, y)
    top1 = probe.score((val_x - mean) / std, val_y)
    print(f"linear probe: top-1 {top1:.3f}")
    assert top1 > 0.75
