"""DETR's losses and matching equal Hugging Face's on the same predictions, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vitdet.losses.criterion import Criterion
from vitdet.losses.matcher import HungarianMatcher
from vitdet.structures import DetectorOutput, SupervisedOutput, Targets

transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")

CLASSES, LAYERS = 6, 3
TERMS = {"ce": ("loss_ce", 1.0), "box": ("loss_bbox", 5.0), "giou": ("loss_giou", 2.0)}  # and their weights


def random_boxes(*shape: int) -> Tensor:
    return torch.cat([torch.rand(*shape, 2) * 0.6 + 0.2, torch.rand(*shape, 2) * 0.3 + 0.05], dim=-1)


def random_targets(*counts: int) -> Targets:
    return Targets.from_lists([random_boxes(n) for n in counts], [torch.randint(CLASSES, (n,)) for n in counts])


def as_labels(targets: Targets) -> list[dict[str, Tensor]]:
    """The same in lists, without padding."""
    rows = zip(targets.labels, targets.boxes, targets.valid, strict=True)
    return [{"class_labels": labels[valid], "boxes": boxes[valid]} for labels, boxes, valid in rows]


def config(**options) -> object:
    """The published numbers: costs and weights 1, 5, 2."""
    return transformers.DetrConfig(num_labels=CLASSES, decoder_layers=LAYERS, **options)


@pytest.mark.parametrize("no_object", [0.1, 0.35])
@pytest.mark.parametrize("counts", [(3, 1), (0, 2), (0, 12), (0, 0)], ids=["few", "one", "more than queries", "none"])
def test_same_losses_and_gradients(counts: tuple[int, int], no_object: float) -> None:
    from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss

    logits = (2 * torch.randn(LAYERS, 2, 8, CLASSES + 1)).requires_grad_()
    boxes, targets = random_boxes(LAYERS, 2, 8).requires_grad_(), random_targets(*counts)
    theirs = config(auxiliary_loss=True, eos_coefficient=no_object)
    total, expected, _ = ForObjectDetectionLoss(
        logits[-1], as_labels(targets), logits.device, boxes[-1], theirs, logits, boxes
    )
    supervised = {f"decoder_{layer}": SupervisedOutput(logits[layer], boxes[layer]) for layer in range(LAYERS)}
    criterion = Criterion(matcher=HungarianMatcher(class_cost=1.0, softmax=True), no_object=no_object)
    losses = criterion(DetectorOutput(logits[-1], boxes[-1], supervised, no_object=True), targets)
    suffixes = {f"decoder_{layer}": f"_{layer}" for layer in range(LAYERS - 1)} | {f"decoder_{LAYERS - 1}": ""}
    assert set(losses) == {f"{name}/{term}" for name in suffixes for term in TERMS} | {"total"}
    for name, suffix in suffixes.items():
        for term, (other, weight) in TERMS.items():
            reference = weight * torch.as_tensor(expected[other + suffix])
            torch.testing.assert_close(losses[f"{name}/{term}"], reference, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses["total"], total, rtol=1e-5, atol=1e-5)
    mine, other = (torch.autograd.grad(loss, [logits, boxes]) for loss in (losses["total"], total))
    for one, two in zip(mine, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_same_matches() -> None:
    from transformers.loss.loss_for_object_detection import HungarianMatcher as Published

    counts = [7, 0, 40, 1]
    output, targets = SupervisedOutput(torch.randn(4, 30, CLASSES + 1), random_boxes(4, 30)), random_targets(*counts)
    expected = Published(1, 5, 2)({"logits": output.logits, "pred_boxes": output.boxes}, as_labels(targets))
    [found] = HungarianMatcher(class_cost=1.0, softmax=True).one_to_one([output], targets)
    assert (found >= 0).sum(1).tolist() == [7, 0, 30, 1]
    for row, (query, target) in zip(found, expected, strict=True):
        index = torch.full((30,), -1).scatter(0, query, target)
        assert torch.equal(row, index)
