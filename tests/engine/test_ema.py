"""The average of the weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from vitdet.engine.ema import ExponentialMovingAverage, scaled_decay


def test_the_published_decay_is_kept_on_the_published_run() -> None:
    """RT-DETR: 72 epochs of 7330 steps at 0.9999."""
    assert scaled_decay(0.9999, total_steps=527_760) == 0.9999


@pytest.mark.parametrize(("steps", "decay"), [(1000, 1 - 1 / 50), (40, 0.5), (20, 0.0), (1, 0.0)])
def test_a_short_run_has_a_short_memory(steps: int, decay: float) -> None:
    assert scaled_decay(0.9999, total_steps=steps) == pytest.approx(decay)


def test_formula() -> None:
    model = nn.Linear(3, 2)
    average = ExponentialMovingAverage(model, decay=0.9, warmup=5)
    expected = model.weight.detach().double()
    for update in range(1, 8):
        with torch.no_grad():
            model.weight.add_(torch.randn_like(model.weight))
        average.update(model)
        decay = 0.9 * (1 - math.exp(-update / 5))
        expected = decay * expected + (1 - decay) * model.weight.detach().double()
        torch.testing.assert_close(average.model.weight.double(), expected, rtol=1e-5, atol=1e-6)
    assert average.updates == 7


def test_integer_buffers_are_copied_and_float_buffers_averaged() -> None:
    model = nn.BatchNorm1d(2)
    average = ExponentialMovingAverage(model, decay=0.5, warmup=1)
    model(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    average.update(model)
    assert int(average.model.num_batches_tracked) == 1
    decay = 0.5 * (1 - math.exp(-1))
    torch.testing.assert_close(average.model.running_mean, (1 - decay) * model.running_mean)


def test_what_is_changed_in_place_is_followed() -> None:
    """The tensors are looked up once; optimizers, batch norms and loading all change them in place."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = ExponentialMovingAverage(model, decay=0.9, warmup=2)
    average.update(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    expected = {name: value.double() for name, value in average.model.state_dict().items()}
    for update in range(2, 6):
        model(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()
        if update == 4:
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        average.update(model)
        decay = 0.9 * (1 - math.exp(-update / 2))
        for name, value in model.state_dict().items():
            expected[name] = decay * expected[name] + (1 - decay) * value.double()
    assert int(average.model[1].num_batches_tracked) == int(model[1].num_batches_tracked) == 5
    del expected["1.num_batches_tracked"]
    for name, value in expected.items():
        torch.testing.assert_close(average.model.state_dict()[name].double(), value, rtol=1e-5, atol=1e-6)


def test_the_average_is_a_copy_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    average = ExponentialMovingAverage(model, decay=0.9, warmup=1)
    assert model.training
    assert not any(module.training for module in average.model.modules())
    assert not any(parameter.requires_grad for parameter in average.model.parameters())
    before = average.model[0].weight.clone()
    with torch.no_grad():
        model[0].weight.add_(1)
    assert torch.equal(average.model[0].weight, before)


def test_state_round_trip() -> None:
    """Going on from a state equals going on without a break, warm-up included."""
    model = nn.Linear(2, 2)
    first = ExponentialMovingAverage(model, decay=0.9, warmup=3)
    with torch.no_grad():
        model.weight.add_(1)
    first.update(model)
    second = ExponentialMovingAverage(nn.Linear(2, 2), decay=0.9, warmup=3)
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        model.weight.mul_(2)
    first.update(model)
    second.update(model)
    assert second.updates == 2
    assert torch.equal(first.model.weight, second.model.weight)
