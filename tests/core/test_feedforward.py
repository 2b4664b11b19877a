"""The feed-forward network and the perceptron against their formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdet.core.feedforward import MLP, FeedForward


@pytest.mark.parametrize(("name", "function"), [("relu", torch.relu), ("gelu", F.gelu), ("silu", F.silu)])
def test_two_layers(name: str, function: Callable[[Tensor], Tensor]) -> None:
    module, x = FeedForward(4, 6, activation=name), torch.randn(2, 3, 4)
    first, last = module.expand, module.contract
    assert (first.weight.shape, last.weight.shape) == ((6, 4), (4, 6))
    torch.testing.assert_close(module(x), function(x @ first.weight.T + first.bias) @ last.weight.T + last.bias)


def test_swiglu() -> None:
    """(SiLU(x W) ⊙ x V) W₂ (arXiv 2002.05202, equation 6), without biases."""
    module, x = FeedForward(4, 6, activation="swiglu", bias=False), torch.randn(2, 3, 4)
    w, v = module.expand.weight.split(6)
    gate = x @ w.T
    expected = (gate * torch.sigmoid(gate) * (x @ v.T)) @ module.contract.weight.T
    torch.testing.assert_close(module(x), expected)
    assert sum(p.numel() for p in module.parameters()) == 3 * 4 * 6


def test_each_token_on_its_own() -> None:
    module, x = FeedForward(4, 6), torch.randn(2, 3, 4)
    torch.testing.assert_close(module(x)[1, 2], module(x[1, 2]))


def test_dropout_in_training_only() -> None:
    x = torch.randn(2, 3, 4)
    module, without = FeedForward(4, 6, dropout=0.5), FeedForward(4, 6)
    without.load_state_dict(module.state_dict())
    assert not torch.equal(module(x), module(x))
    assert torch.equal(module.eval()(x), without(x))
    all_dropped = FeedForward(4, 6, dropout=1.0)  # the last bias alone is left
    torch.testing.assert_close(all_dropped(x), all_dropped.contract.bias.expand_as(x))


def test_unknown_activation() -> None:
    with pytest.raises(ValueError, match=r"unknown activation 'tanh'; use one of \['relu', 'gelu', 'silu', 'swiglu'\]"):
        FeedForward(4, 6, activation="tanh")


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_perceptron(layers: int) -> None:
    module, x = MLP(3, 8, 5, layers=layers), torch.randn(7, 3)
    linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
    assert len(linear) == layers
    expected = x
    for layer in linear[:-1]:
        expected = (expected @ layer.weight.T + layer.bias).clamp(min=0)
    expected = expected @ linear[-1].weight.T + linear[-1].bias
    assert expected.shape == (7, 5)
    assert expected.min() < 0  # no ReLU after the last
    torch.testing.assert_close(module(x), expected)
