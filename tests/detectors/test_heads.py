"""Logits of boxes and the start of the heads."""

from __future__ import annotations

import pytest
import torch

from vitdet.detectors.heads import inverse_sigmoid, make_box_head, make_score_head


def test_inverse_of_the_sigmoid() -> None:
    values = torch.linspace(1e-4, 1 - 1e-4, 101)
    torch.testing.assert_close(inverse_sigmoid(values).sigmoid(), values)
    assert inverse_sigmoid(torch.tensor([0.25])).item() == pytest.approx(-1.098612, abs=1e-6)  # ln(1/3)


def test_finite_at_and_beyond_the_ends() -> None:
    found = inverse_sigmoid(torch.tensor([-0.5, 0.0, 1.0, 2.0]), eps=1e-3)
    assert found.tolist() == pytest.approx([-6.907755, -6.907755, 6.907755, 6.907755], abs=1e-3)  # ln(1e-3)


def test_scores_start_at_the_prior() -> None:
    assert make_score_head(16, 5)(torch.zeros(16)).sigmoid().tolist() == pytest.approx([0.01] * 5)
    assert make_score_head(16, 5, prior=0.2)(torch.zeros(16)).sigmoid().tolist() == pytest.approx([0.2] * 5)


def test_boxes_start_at_their_reference() -> None:
    head = make_box_head(16)
    assert len(head.layers) == 3
    assert head(torch.randn(7, 16)).tolist() == [[0.0] * 4] * 7
    assert all(layer.weight.abs().max() > 0 for layer in head.layers[:-1])  # or it could never learn
