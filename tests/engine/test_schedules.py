"""The learning rate's multiplier over a run."""

from __future__ import annotations

import pytest

from vitdet.engine.schedules import SCHEDULES, rate_multiplier, warmup_steps


@pytest.mark.parametrize(
    ("total", "fraction", "most", "steps"),
    [(1000, 0.05, 2000, 50), (528_000, 0.05, 2000, 2000), (10, 0.05, 2000, 0), (100, 0.0, 2000, 0), (100, 1.0, 7, 7)],
)
def test_warmup_steps(total: int, fraction: float, most: int, steps: int) -> None:
    assert warmup_steps(total, fraction=fraction, most=most) == steps


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_ramp_is_linear_and_ends_at_one(schedule: str) -> None:
    values = [rate_multiplier(step, total=100, warmup=4, schedule=schedule) for step in range(5)]
    assert values == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_constant() -> None:
    assert {rate_multiplier(step, total=50, warmup=0, schedule="constant", final=0.1) for step in range(50)} == {1.0}


def test_cosine() -> None:
    def rate(step: int) -> float:
        return rate_multiplier(step, total=110, warmup=10, schedule="cosine", final=0.2)

    assert rate(10) == pytest.approx(1.0)
    assert rate(60) == pytest.approx(0.6)  # half way between 1 and 0.2
    assert rate(35) == pytest.approx(0.2 + 0.8 * (1 + 0.5**0.5) / 2)  # a quarter of the way
    assert rate(109) == pytest.approx(0.2, abs=1e-3)
    assert rate(110) == pytest.approx(0.2)


def test_flat_cosine() -> None:
    def rate(step: int) -> float:
        return rate_multiplier(step, total=100, warmup=10, schedule="flat_cosine", flat=0.6)

    assert [rate(step) for step in (10, 30, 59, 60)] == pytest.approx([1.0] * 4)
    assert rate(80) == pytest.approx(0.5)
    assert rate(99) == pytest.approx(0.0, abs=2e-3)


def test_flat_cosine_does_not_fall_within_the_ramp() -> None:
    values = [rate_multiplier(s, total=20, warmup=10, schedule="flat_cosine", flat=0.1) for s in range(20)]
    assert values[:11] == sorted(values[:11])
    assert values[10] == pytest.approx(1.0)
    assert values[15] == pytest.approx(0.5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_runs_of_one_step_have_a_rate(schedule: str) -> None:
    assert rate_multiplier(0, total=1, warmup=0, schedule=schedule, flat=1.0) == 1.0


def test_step() -> None:
    """DETR: a tenth of the rate after 400 of 500 epochs (arXiv 2005.12872, appendix A.4)."""

    def rate(step: int) -> float:
        return rate_multiplier(step, total=500, warmup=0, schedule="step", flat=0.8, final=0.1)

    assert [rate(step) for step in (0, 399, 400, 499)] == [1.0, 1.0, 0.1, 0.1]


def test_quadratic_ramp() -> None:
    values = [rate_multiplier(s, total=100, warmup=4, schedule="constant", ramp="quadratic") for s in range(6)]
    assert values == pytest.approx([0.04, 0.16, 0.36, 0.64, 1.0, 1.0])


def test_deim() -> None:
    """S: 132 epochs, constant for 64, half the rate from 120 on (its repository, deim_hgnetv2_s_coco.yml)."""
    steps = 10  # an epoch

    def rate(epoch: float) -> float:
        return rate_multiplier(
            round(epoch * steps), total=132 * steps, warmup=20, schedule="flat_cosine", flat=64 / 132, final=0.5,
            settled=12 / 132, ramp="quadratic",
        )  # fmt: skip

    assert rate(1) == pytest.approx((11 / 21) ** 2)
    assert [rate(epoch) for epoch in (2, 30, 64)] == [1.0] * 3
    assert rate(92) == pytest.approx(0.75)  # half way from 64 to 120
    assert rate(119) > 0.5
    assert [rate(epoch) for epoch in (120, 125, 131.9)] == pytest.approx([0.5] * 3)


def test_a_cosine_that_settles_before_it_begins_steps() -> None:
    values = [
        rate_multiplier(s, total=10, warmup=0, schedule="flat_cosine", flat=0.8, settled=0.5, final=0.3)
        for s in range(10)
    ]
    assert values[:8] == [1.0] * 8
    assert values[9] == pytest.approx(0.3)
