"""Normalisation by name, against the formulas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vitdet.core.norms import make_norm


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
