"""Learning-rate schedules as multipliers of the base rate over a run of known length."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "cosine", "flat_cosine", "step")
RAMPS = {"linear": 1, "quadratic": 2}


def warmup_steps(total: int, *, fraction: float, most: int) -> int:
    """Length of a ramp: ``fraction`` of the run, at most ``most`` steps.

    The published recipes ramp for a fixed 2000 iterations, longer than many a fine-tuning run lasts.
    """
    return min(most, round(fraction * total))


def rate_multiplier(
    step: int, *, total: int, warmup: int, schedule: str, final: float = 0.0, flat: float = 0.5, settled: float = 0.0,
    ramp: str = "linear",
) -> float:  # fmt: skip
    """What the base rate is multiplied by at optimizer step ``step`` (0 … total - 1).

    Args:
        warmup: steps of ramp from (1/(warmup + 1))^n of the rate.
        schedule: ``constant``; ``cosine`` from the ramp's end to ``final``; ``flat_cosine``: constant for the share
            ``flat`` of the run, then cosine to ``final``; ``step``: constant for this share, then ``final`` at once.
        settled: share of the run, at its end, by which a cosine has reached ``final`` (DEIM, arXiv 2412.04234).
        ramp: ``linear``, n = 1, or ``quadratic``, n = 2.
    """
    if step < warmup:
        return ((step + 1) / (warmup + 1)) ** RAMPS[ramp]
    if schedule == "constant":
        return 1.0
    start = warmup if schedule == "cosine" else max(warmup, round(flat * total))
    if step < start:
        return 1.0
    if schedule == "step":
        return final
    progress = min(1.0, (step - start) / max(1, total - round(settled * total) - start))
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
