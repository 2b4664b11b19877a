"""Our RT-DETRv2 equals Hugging Face's when both hold the same weights; see :mod:`tests.parity.random_detectors`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.parity.random_detectors import (
    assert_same_outputs,
    load_theirs,
    random_images,
    some_labels,
    untied,
    with_random_values,
)
from vitdet.detectors.rtdetr import rtdetrv2_r18
from vitdet.losses.criterion import Criterion
from vitdet.losses.matcher import HungarianMatcher
from vitdet.structures import Targets

transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")

BACKBONE = {
    "embedding_size": 64,
    "hidden_sizes": [64, 128, 256, 512],
    "depths": [2, 2, 2, 2],
    "layer_type": "basic",
    "out_features": ["stage2", "stage3", "stage4"],
}


def reference(**options) -> nn.Module:
    """Their model with the numbers of the published R18."""
    numbers = {"decoder_layers": 3} | options
    config = transformers.RTDetrV2Config(
        backbone_config=transformers.RTDetrResNetConfig(**BACKBONE), encoder_in_channels=[128, 256, 512],
        hidden_expansion=0.5, num_labels=80, tie_word_embeddings=False, **numbers,
    )  # fmt: skip
    return untied(with_random_values(transformers.RTDetrV2ForObjectDetection(config)))


@pytest.mark.parametrize("points", [4, 2])
def test_same_outputs_from_their_file(points: int, tmp_path: Path) -> None:
    theirs = reference(decoder_n_points=points, decoder_offset_scale=0.4).eval()
    theirs.save_pretrained(tmp_path)
    model = rtdetrv2_r18(80, points=points, reach=0.4).eval()
    report = load_theirs(model, tmp_path)
    assert all(name.endswith("num_batches_tracked") for name in report.missing)
    assert not report.unexpected
    assert not report.reshaped
    assert_same_outputs(theirs, model, [(640, 640), (480, 640)])


@pytest.mark.parametrize("size", [(640, 640), (480, 640)], ids=["square", "not square"])
def test_same_outputs_with_discrete_sampling(size: tuple[int, int], tmp_path: Path) -> None:
    """Rounding moves a location from one cell to the next here and there, so a few queries of one layer may differ."""
    theirs = reference(decoder_method="discrete", decoder_layers=1).eval()
    theirs.save_pretrained(tmp_path)
    model = rtdetrv2_r18(80, sampling="discrete", decoder_layers=1).eval()
    load_theirs(model, tmp_path)
    images = random_images(1, *size)
    with torch.inference_mode():
        expected, output = theirs(images), model(images)
        model.decoder.layers[0].cross_attention.sampling = "bilinear"
        other = model(images)
    mine, reference_values = (torch.cat([one, two], -1)[0] for one, two in (
        (output.logits, output.boxes), (expected.logits, expected.pred_boxes),
    ))  # fmt: skip
    nearest = torch.cdist(mine, reference_values, p=float("inf")).amin(-1)  # (Q,)
    assert (nearest < 1e-4).float().mean() > 0.97
    assert (other.logits - output.logits).abs().max() > 1e-2


@pytest.mark.parametrize("denoising", [0, 100], ids=["without denoising", "with denoising"])
def test_same_losses(denoising: int, tmp_path: Path) -> None:
    """Both draw the noise of the denoising queries in the same order, and nothing else."""
    theirs = reference(freeze_backbone_batch_norms=False, num_denoising=denoising)
    theirs.save_pretrained(tmp_path)
    ours = rtdetrv2_r18(80, denoising_queries=denoising)
    load_theirs(ours, tmp_path)
    images, (labels, boxes) = random_images(2, 224, 256), some_labels()
    given = [{"class_labels": k, "boxes": b} for k, b in zip(labels, boxes, strict=True)]
    torch.manual_seed(0)
    expected = theirs.train()(images, labels=given)
    targets = Targets.from_lists(boxes, labels)
    torch.manual_seed(0)
    losses = Criterion(matcher=HungarianMatcher())(ours.train()(images, targets), targets)
    suffixes = {"decoder_0": "_aux_0", "decoder_1": "_aux_1", "decoder_2": "", "encoder": "_aux_2"}
    suffixes |= {f"denoising_{layer}": f"_dn_{layer}" for layer in range(3 if denoising else 0)}
    terms = {"vfl": "loss_vfl", "box": "loss_bbox", "giou": "loss_giou"}
    names = {f"{name}/{term}": other + end for name, end in suffixes.items() for term, other in terms.items()}
    assert set(losses) == {*names, "total"}
    assert set(expected.loss_dict) == set(names.values())
    for name, other in names.items():
        torch.testing.assert_close(losses[name], expected.loss_dict[other], rtol=1e-4, atol=1e-4, msg=name)
    torch.testing.assert_close(losses["total"], expected.loss, rtol=1e-4, atol=1e-4)
