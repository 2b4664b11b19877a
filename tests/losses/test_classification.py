"""The losses of the classes against their formulas, digit by digit."""

from __future__ import annotations

import math

import pytest
import torch

from vitdet.losses.classification import matchability_aware_loss, no_object_cross_entropy, varifocal_loss

LOGITS = [2.0, -1.0, 0.5]
QUALITY = [0.7, 0.0, 0.0]
POSITIVE = [True, False, True]


@pytest.mark.parametrize(("alpha", "gamma"), [(0.75, 2.0), (0.5, 1.5)])
def test_by_hand(alpha: float, gamma: float) -> None:
    """−q (q ln p + (1 − q) ln(1 − p)) at positives, −α pᵞ ln(1 − p) at negatives (arXiv 2008.13367, equation 2)."""
    expected = []
    for logit, q, positive in zip(LOGITS, QUALITY, POSITIVE, strict=True):
        p = 1 / (1 + math.exp(-logit))
        if positive:
            expected.append(-q * (q * math.log(p) + (1 - q) * math.log(1 - p)))
        else:
            expected.append(-alpha * p**gamma * math.log(1 - p))
    assert expected[2] == 0  # a positive whose box misses its target altogether teaches nothing
    found = varifocal_loss(
        torch.tensor(LOGITS), torch.tensor(QUALITY), torch.tensor(POSITIVE), alpha=alpha, gamma=gamma
    )
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_weight_is_no_part_of_the_gradient() -> None:
    logits = torch.tensor(LOGITS, requires_grad=True)
    varifocal_loss(logits, torch.tensor(QUALITY), torch.tensor(POSITIVE)).sum().backward()
    expected = []
    for logit, q, positive in zip(LOGITS, QUALITY, POSITIVE, strict=True):
        p = 1 / (1 + math.exp(-logit))
        expected.append((q if positive else 0.75 * p**2) * (p - q))
    assert logits.grad.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("alpha", "gamma"), [(1.0, 1.5), (0.5, 2.0)])
def test_matchability_aware_by_hand(alpha: float, gamma: float) -> None:
    """−qᵞ ln p − (1 − qᵞ) ln(1 − p) at positives, −α pᵞ ln(1 − p) at negatives (arXiv 2412.04234, section 3.3)."""
    expected = []
    for logit, q, positive in zip(LOGITS, QUALITY, POSITIVE, strict=True):
        p = 1 / (1 + math.exp(-logit))
        if positive:
            expected.append(-(q**gamma) * math.log(p) - (1 - q**gamma) * math.log(1 - p))
        else:
            expected.append(-alpha * p**gamma * math.log(1 - p))
    assert expected[2] > 0.9  # unlike in the varifocal loss, a box that misses its target teaches its query to doubt
    logits = torch.tensor(LOGITS, requires_grad=True)
    found = matchability_aware_loss(logits, torch.tensor(QUALITY), torch.tensor(POSITIVE), alpha=alpha, gamma=gamma)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    found.sum().backward()
    gradient = []
    for logit, q, positive in zip(LOGITS, QUALITY, POSITIVE, strict=True):
        p = 1 / (1 + math.exp(-logit))
        gradient.append((1 if positive else alpha * p**gamma) * (p - q**gamma))  # the weight is no part of it
    assert logits.grad.tolist() == pytest.approx(gradient, abs=1e-6)


def test_cross_entropy_with_no_object_by_hand() -> None:
    """Two classes and "no object", uniform logits but for one: ln 3 each, the sure one ln(1 + 2 / e²)."""
    logits = torch.zeros(1, 3, 3)
    logits[0, 0, 1] = 2.0
    labels, positive = torch.tensor([[1, 0, 0]]), torch.tensor([[True, False, False]])
    loss = no_object_cross_entropy(logits, labels, positive, no_object=0.1)
    expected = (math.log(1 + 2 * math.exp(-2)) + 2 * 0.1 * math.log(3)) / 1.2
    assert loss.item() == pytest.approx(expected, abs=1e-6)
