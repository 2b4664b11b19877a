"""Real weights that somebody else trained, as features: a linear classifier on them, on real photographs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from vitdet import load_model
from vitdet.data.formats import read_classification_set
from vitdet.data.images import decode_image
from vitdet.data.transforms import to_input

pytestmark = pytest.mark.slow


@torch.inference_mode()
def features(model: Any, root: Path, split: str) -> tuple[Tensor, Tensor]:
    """Class token and mean of the patches' (N, 2 C) of each image, and the labels (N,)."""
    data = read_classification_set(root, split)
    preprocessing = model.metadata.preprocessing
    found = []
    for start in range(0, len(data), 20):
        pixels = [torch.from_numpy(to_input(decode_image(p), preprocessing)) for p in data.paths[start : start + 20]]
        images = preprocessing.normalize(torch.stack(pixels).permute(0, 3, 1, 2))
        tokens = model.backbone.tokens(images)
        found.append(torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=1))
    return torch.cat(found), torch.from_numpy(data.labels)


def test_a_linear_probe_on_dinov2(shared_data: Path) -> None:
    weights = next((shared_data / "weights" / "dinov2_vits14").glob("*.safetensors"))
    model = load_model(weights, model="vit_small_patch14_dinov2", image_size=(224, 224))
    root = shared_data / "classification" / "imagenette224_small"
    (x, y), (val_x, val_y) = features(model, root, "train"), features(model, root, "val")
    mean, std = x.mean(dim=0), x.std(dim=0)
    probe = LogisticRegression(C=0.01, max_iter=2000).fit(((x - mean) / std).numpy(), y.numpy())
    top1 = probe.score(((val_x - mean) / std).numpy(), val_y.numpy())
    print(f"linear probe: top-1 {top1:.3f}")
    assert top1 > 0.75
