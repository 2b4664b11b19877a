"""Batch norms that get statistics back."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
from torch import nn

from vitdet.data.images import decode_image
from vitdet.data.transforms import to_input
from vitdet.engine.statistics import restore_statistics
from vitdet.weights.deimv2 import is_merged
from vitdet.zoo import load_model


def test_evaluation_stays_and_training_equals_it() -> None:
    """In double precision; on one batch the two modes then have the same statistics."""
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4)]
    net = nn.Sequential(*layers).double()
    with torch.no_grad():
        for norm in (layers[1], layers[4]):
            norm.bias.normal_()
            norm.weight.uniform_(0.5, 2)
            norm.running_var.uniform_(0.5, 2)
            norm.running_mean.normal_()
    images = torch.randn(6, 3, 12, 10, dtype=torch.float64) * 3 + 1
    expected = copy.deepcopy(net).eval()(images)
    assert (copy.deepcopy(net).train()(images) - expected).abs().max() > 0.5
    restore_statistics(net.train(), [images[:4], images[4:]])
    assert net.training
    torch.testing.assert_close(copy.deepcopy(net).eval()(images), expected)
    torch.testing.assert_close(net(images), expected)


def test_merged_weights_see_the_same_in_training(shared_data: Path) -> None:
    """DEIMv2's file for inference on eight photographs: without statistics its scores fall apart."""
    model = load_model(shared_data / "weights" / "deimv2" / "deimv2_atto_coco_fused.safetensors")
    paths = sorted((shared_data / "detection" / "coco_mini" / "val" / "images").glob("*.jpg"))[:16]
    preprocessing = model.metadata.preprocessing
    pixels = np.stack([to_input(decode_image(path), preprocessing) for path in paths])
    images = preprocessing.normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2))

    def scores(net: nn.Module, training: bool) -> torch.Tensor:
        with torch.no_grad():
            return net.train(training)(images).logits.sigmoid().amax((1, 2))

    assert is_merged(model.state_dict())
    before, lost = scores(copy.deepcopy(model), False), scores(copy.deepcopy(model), True)
    restore_statistics(model, images.split(4))
    assert not is_merged(model.state_dict())
    torch.testing.assert_close(scores(copy.deepcopy(model), False), before, atol=2e-3, rtol=0)
    assert (lost - before).abs().mean() > 0.2
    assert (scores(model, True) - before).abs().mean() < 0.05
