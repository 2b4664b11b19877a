"""The classifiers' criterion against torch's and timm's losses, and DeiT's equation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

from vitdet.losses.labels import ClassificationCriterion
from vitdet.structures import ImageTargets

B, K = 6, 5


def one_hot() -> tuple[torch.Tensor, ImageTargets]:
    labels = torch.randint(K, (B,))
    return labels, ImageTargets.from_labels(labels, K)


def mixed() -> ImageTargets:
    """As mixup makes them: two classes an image."""
    share = torch.rand(B, 1) * 0.98 + 0.01
    first, second = (ImageTargets.from_labels((torch.arange(B) + shift) % K, K) for shift in (0, 2))
    return ImageTargets(share * first.probabilities + (1 - share) * second.probabilities)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_softmax_is_torchs_and_timms_cross_entropy(smoothing: float) -> None:
    logits = torch.randn(B, K) * 4
    criterion = ClassificationCriterion(label_smoothing=smoothing)
    labels, targets = one_hot()
    found = criterion(logits, targets)
    assert set(found) == {"loss_class", "total"}
    assert found["total"].item() == pytest.approx(LabelSmoothingCrossEntropy(smoothing)(logits, labels).item())
    reference = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    assert found["loss_class"].item() == pytest.approx(reference.item())
    targets = mixed()
    reference = F.cross_entropy(logits, targets.probabilities, label_smoothing=smoothing)
    assert criterion(logits, targets)["total"].item() == pytest.approx(reference.item())
    smoothed = targets.probabilities * (1 - smoothing) + smoothing / K
    timms = SoftTargetCrossEntropy()(logits, smoothed)
    assert criterion(logits, targets)["total"].item() == pytest.approx(timms.item())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sigmoid_is_timms_binary_cross_entropy(smoothing: float) -> None:
    logits = torch.randn(B, K) * 4
    criterion = ClassificationCriterion(kind="sigmoid", label_smoothing=smoothing)
    labels, targets = one_hot()
    reference = BinaryCrossEntropy(smoothing=smoothing)(logits, labels)
    assert criterion(logits, targets)["total"].item() == pytest.approx(reference.item())


def test_sigmoid_counts_a_mixed_class_as_wholly_present() -> None:
    logits, targets = torch.randn(B, K), mixed()
    reference = BinaryCrossEntropy(smoothing=0.0, target_threshold=0.0)(logits, targets.probabilities)
    found = ClassificationCriterion(kind="sigmoid")(logits, targets)["total"]
    assert found.item() == pytest.approx(reference.item())
    softer = F.binary_cross_entropy_with_logits(logits, targets.probabilities)
    assert found.item() != pytest.approx(softer.item(), rel=1e-3)


@pytest.mark.parametrize("weight", [0.5, 0.3, 1.0])
def test_hard_distillation(weight: float) -> None:
    """DeiT's equation 3, with each term's gradient at its own head only."""
    logits = torch.randn(B, 2, K, requires_grad=True)
    targets = mixed()
    targets.teacher = torch.randint(K, (B,))
    losses = ClassificationCriterion(distillation=weight, label_smoothing=0.1)(logits, targets)
    labels = F.cross_entropy(logits[:, 0], targets.probabilities, label_smoothing=0.1)
    teacher = F.cross_entropy(logits[:, 1], targets.teacher)
    assert losses["loss_class"].item() == pytest.approx((1 - weight) * labels.item())
    assert losses["loss_distill"].item() == pytest.approx(weight * teacher.item())
    assert losses["total"].item() == pytest.approx(((1 - weight) * labels + weight * teacher).item())
    (gradient,) = torch.autograd.grad(losses["loss_distill"], logits)
    assert (gradient[:, 0] == 0).all()
    assert (gradient[:, 1] != 0).any()


@pytest.mark.parametrize(("weight", "teacher"), [(0.5, False), (0.0, True), (0.0, False)])
def test_without_a_teacher_both_heads_learn_the_labels(weight: float, teacher: bool) -> None:
    logits, targets = torch.randn(B, 2, K), mixed()
    targets.teacher = torch.zeros(B, dtype=torch.int64) if teacher else None
    losses = ClassificationCriterion(distillation=weight)(logits, targets)
    heads = [F.cross_entropy(logits[:, head], targets.probabilities).item() for head in (0, 1)]
    assert set(losses) == {"loss_class", "total"}
    assert losses["total"].item() == pytest.approx(sum(heads) / 2)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_float32_whatever_the_precision_of_the_model(kind: str) -> None:
    logits = (torch.randn(B, 2, K) * 10).bfloat16()
    targets = ImageTargets(mixed().probabilities, torch.randint(K, (B,)))
    criterion = ClassificationCriterion(kind=kind, label_smoothing=0.1, distillation=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = criterion(logits, targets)
    outside = criterion(logits.float(), targets)
    for name, value in inside.items():
        assert value.dtype == torch.float32
        assert value.item() == outside[name].item()


def test_what_does_not_fit_is_named() -> None:
    _, targets = one_hot()
    with pytest.raises(ValueError, match=r"where the targets are \(6, 5\), got \(6, 4\)"):
        ClassificationCriterion()(torch.zeros(B, 4), targets)
    with pytest.raises(ValueError, match=r"got \(6, 3, 5\)"):
        ClassificationCriterion()(torch.zeros(B, 3, K), targets)
    targets.teacher = torch.zeros(B, dtype=torch.int64)
    with pytest.raises(ValueError, match="needs a model with a distillation token"):
        ClassificationCriterion(distillation=0.5)(torch.zeros(B, K), targets)
    with pytest.raises(ValueError, match=r"label_smoothing is a share in \[0, 1\), got 1"):
        ClassificationCriterion(label_smoothing=1)
    with pytest.raises(ValueError, match="'softmax' or 'sigmoid', got 'focal'"):
        ClassificationCriterion(kind="focal")
    with pytest.raises(ValueError, match=r"distillation is a weight in \[0, 1\], got 2"):
        ClassificationCriterion(distillation=2)
