"""Normalisation by name, against the formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitdet.core.norms import UnitNorm, make_norm, make_qk_norm


@pytest.mark.parametrize("name", ["layer", "rms"])
def test_formula(name: str) -> None:
    norm, x, eps = make_norm(name, 8, eps=1e-2), torch.randn(3, 8), 1e-2
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    if name == "layer":
        centred = x - x.mean(-1, keepdim=True)
        expected = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight + norm.bias
    else:
        expected = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"unknown norm 'batch'; use 'layer' or 'rms'"):
        make_norm("batch", 8)


def test_what_each_norm_is_blind_to() -> None:
    """RMSNorm to the scale of its input (arXiv 1910.07467, section 4); LayerNorm to its mean, too."""
    x = torch.randn(3, 8)
    for name in ("layer", "rms"):
        norm = make_norm(name, 8, eps=1e-12)
        torch.testing.assert_close(norm(5 * x), norm(x))
        assert ((norm(x + 3) - norm(x)).abs().max() < 1e-5) == (name == "layer")


def test_cosine_scores_equal_the_formula_of_swin_v2() -> None:
    """exp(min(s, ln 100)) cos(q, k), and attention divides by √D afterwards (arXiv 2111.09883, eq. 2)."""
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4)
    q_norm, k_norm = make_qk_norm("cosine", 3, 4)
    assert isinstance(q_norm, UnitNorm)
    assert q_norm.log_scale is not None
    torch.testing.assert_close(q_norm.log_scale.exp(), torch.full((3, 1, 1), 10.0))
    with torch.no_grad():
        q_norm.log_scale.copy_(torch.tensor([0.0, 1.0, 99.0]).view(3, 1, 1))
    scores = q_norm(q) @ k_norm(k).transpose(-2, -1) / 4**0.5
    cosine = F.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1)
    expected = cosine * torch.tensor([1.0, math.e, 100.0]).view(3, 1, 1)
    torch.testing.assert_close(scores, expected)
    assert list(k_norm.parameters()) == []


@pytest.mark.parametrize(("name", "bound"), [("rms", 8**0.5), ("layer", 8**0.5), ("cosine", 10.0)])
def test_normed_scores_are_bounded(name: str, bound: float) -> None:
    """By Cauchy and Schwarz: heads of length √D give at most √D after the division; cosines at most their factor."""
    q_norm, k_norm = make_qk_norm(name, 3, 8)
    q, k = 1e3 * torch.randn(2, 3, 50, 8), 1e3 * torch.randn(2, 3, 50, 8)
    k[:, :, 0] = q[:, :, 0]  # the bound is reached
    scores = q_norm(q) @ k_norm(k).transpose(-2, -1) / 8**0.5
    assert scores.abs().max().item() == pytest.approx(bound, rel=1e-4)
    assert (q @ k.transpose(-2, -1)).abs().max() > 1e5


def test_no_norm_of_queries_and_keys() -> None:
    assert all(isinstance(norm, nn.Identity) for norm in make_qk_norm(None, 3, 8))
    with pytest.raises(ValueError, match=r"unknown norm 'l2'; use 'layer' or 'rms'"):
        make_qk_norm("l2", 3, 8)
