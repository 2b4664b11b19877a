"""The varifocal loss against its formula, digit by digit."""

from __future__ import annotations

import math

import pytest
import torch

from vitdet.losses.classification import varifocal_loss

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
