"""Our RT-DETR equals Hugging Face's when both hold the same weights: outputs, losses, gradients.

The weights are random, but no value that a fresh model has at 0 or 1 is left there (heads, norms, running statistics,
sampling offsets), or whole branches would be compared that do nothing. They travel through the file that
``save_pretrained`` writes and through our reader, as a published checkpoint does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.parity.random_detectors import (
    assert_same_outputs,
    load_theirs,
    random_images,
    with_random_values,
)
from vitdet.detectors.rtdetr import RTDETR, rtdetr_r18, rtdetr_r50
from vitdet.errors import UserError
from vitdet.losses.criterion import Criterion
from vitdet.losses.matcher import HungarianMatcher
from vitdet.structures import Targets
from vitdet.weights.rtdetr import HUGGINGFACE_RULES
from vitdet.weights.rules import convert_state_dict

transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")

R18_BACKBONE = {
    "embedding_size": 64,
    "hidden_sizes": [64, 128, 256, 512],
    "depths": [2, 2, 2, 2],
    "layer_type": "basic",
    "out_features": ["stage2", "stage3", "stage4"],
}


def reference_r18(num_labels: int = 80, **options) -> nn.Module:
    """Their model with the numbers of the published R18."""
    config = transformers.RTDetrConfig(
        backbone_config=transformers.RTDetrResNetConfig(**R18_BACKBONE),
        encoder_in_channels=[128, 256, 512],
        decoder_layers=3,
        hidden_expansion=0.5,
        num_labels=num_labels,
        **options,
    )
    return with_random_values(transformers.RTDetrForObjectDetection(config))


def reference_r50(**options) -> nn.Module:
    """Their model with its default numbers, the published R50's."""
    config = transformers.RTDetrConfig(num_labels=80, **options)
    return with_random_values(transformers.RTDetrForObjectDetection(config))


@pytest.mark.parametrize(
    ("reference", "ours"), [(reference_r18, rtdetr_r18), (reference_r50, rtdetr_r50)], ids=["r18", "r50"]
)
def test_same_outputs_from_their_file(reference, ours, tmp_path: Path) -> None:
    theirs = reference().eval()
    theirs.save_pretrained(tmp_path)
    model = ours(num_classes=80).eval()
    report = load_theirs(model, tmp_path)
    assert all(name.endswith("num_batches_tracked") for name in report.missing)
    assert not report.unexpected
    assert not report.reshaped
    assert_same_outputs(theirs, model, [(640, 640), (480, 640)])


def their_loss_names(layers: int, *, denoising: bool) -> dict[str, str]:
    """Our names of the losses to theirs: the last layer has no suffix, the encoder is their last auxiliary output."""
    suffixes = {f"decoder_{index}": f"_aux_{index}" for index in range(layers - 1)}
    suffixes |= {f"decoder_{layers - 1}": "", "encoder": f"_aux_{layers - 1}"}
    suffixes |= {f"denoising_{index}": f"_dn_{index}" for index in range(layers if denoising else 0)}
    terms = {"vfl": "loss_vfl", "box": "loss_bbox", "giou": "loss_giou"}
    return {f"{ours}/{term}": name + suffix for ours, suffix in suffixes.items() for term, name in terms.items()}


@pytest.fixture(params=["r18", "r18 with denoising", "r50"])
def trained_pair(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[nn.Module, RTDETR]:
    """Both in training mode; R50 with frozen norms in its backbone."""
    if request.param != "r50":
        denoising = 100 if "denoising" in request.param else 0
        theirs = reference_r18(freeze_backbone_batch_norms=False, num_denoising=denoising)
        ours = rtdetr_r18(80, denoising_queries=denoising)
    else:
        theirs = reference_r50(num_denoising=0)
        ours = rtdetr_r50(80, frozen_norm=True, denoising_queries=0)
    theirs.save_pretrained(tmp_path)
    load_theirs(ours, tmp_path)
    return theirs.train(), ours.train()


def test_same_losses_and_gradients(trained_pair: tuple[nn.Module, RTDETR]) -> None:
    """Both draw the noise of the denoising queries in the same order, and nothing else."""
    theirs, ours = trained_pair
    images = random_images(2, 224, 256)
    labels = [torch.tensor([3, 71, 3]), torch.tensor([0])]
    boxes = [
        torch.tensor([[0.3, 0.4, 0.2, 0.3], [0.6, 0.5, 0.5, 0.8], [0.8, 0.2, 0.1, 0.1]]),
        torch.tensor([[0.5, 0.5, 0.9, 0.3]]),
    ]
    torch.manual_seed(0)
    expected = theirs(images, labels=[{"class_labels": k, "boxes": b} for k, b in zip(labels, boxes, strict=True)])
    targets = Targets.from_lists(boxes, labels)
    torch.manual_seed(0)
    losses = Criterion(matcher=HungarianMatcher())(ours(images, targets), targets)
    names = their_loss_names(layers=len(ours.decoder.layers), denoising=ours.denoising is not None)
    assert set(losses) == {*names, "total"}
    assert set(expected.loss_dict) == set(names.values())
    for name, their_name in names.items():
        torch.testing.assert_close(losses[name], expected.loss_dict[their_name], rtol=1e-4, atol=1e-4, msg=name)
    torch.testing.assert_close(losses["total"], expected.loss, rtol=1e-4, atol=1e-4)

    losses["total"].backward()
    expected.loss.backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    their_gradients = convert_state_dict(gradients, HUGGINGFACE_RULES)
    our_gradients = {name: p.grad for name, p in ours.named_parameters()}
    assert our_gradients.keys() == their_gradients.keys()
    tolerance = 1e-3 if ours.denoising is None else 1e-2  # one query can be a large share of a class's gradient
    for name, gradient in our_gradients.items():
        # In norm, since one activation at ReLU's edge may fall on either side. A shift before batch statistics has no
        # effect: such gradients are rounding alone, about 1e-7.
        expected_gradient = their_gradients[name]
        error = (gradient - expected_gradient).norm() / expected_gradient.norm().clamp(min=1e-2)
        assert error < tolerance, name


def test_another_number_of_classes_must_be_allowed(tmp_path: Path) -> None:
    reference_r18(num_labels=3).save_pretrained(tmp_path)
    model = rtdetr_r18(80)
    with pytest.raises(UserError, match=r"RTDETR: 9 of another shape: "):
        load_theirs(model, tmp_path)
    report = load_theirs(model, tmp_path, allow_reshaped=("*score_head*", "denoising.*"))
    assert len(report.reshaped) == 9  # weight and bias of three layers' and the encoder's head, and the embedding
