"""Statistics for batch norms that know none: of models whose convolutions have swallowed theirs for inference."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


@torch.no_grad()
def restore_statistics(model: nn.Module, images: Iterable[Tensor]) -> None:
    """Give every batch norm the mean and variance of its input, and scale and shift that undo them.

    What the model computes in evaluation stays the same; in training, where norms use the statistics of the batch, it
    computes nearly that from the first step on, instead of normalising what never was.

    Args:
        model: left in the mode in which it is.
        images: batches (B, 3, h, w) as the model takes them, like those that it is to be trained on.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    sums = {norm: torch.zeros(3, norm.num_features, dtype=torch.float64) for norm in norms}
    handles = [norm.register_forward_pre_hook(_adding(sums[norm])) for norm in norms]
    training = model.training
    try:
        model.eval()
        for batch in images:
            model(batch)
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    for norm, (count, total, squares) in sums.items():
        old_mean, old_variance = norm.running_mean, norm.running_var
        if old_mean is None or old_variance is None or not count.any():  # it keeps none, or saw nothing
            continue
        mean = (total / count).to(norm.weight)
        variance = (squares / count - (total / count) ** 2).clamp(min=0).to(norm.weight)
        scale = norm.weight / (old_variance + norm.eps).sqrt()
        norm.bias.copy_(norm.bias + (mean - old_mean) * scale)
        norm.weight.copy_(scale * (variance + norm.eps).sqrt())
        old_mean.copy_(mean)
        old_variance.copy_(variance)


def _adding(sums: Tensor) -> Callable[[nn.Module, tuple[Tensor]], None]:
    """A hook that adds number, sum and sum of squares of each channel of (B, C, h, w) maps."""

    def add(module: nn.Module, inputs: tuple[Tensor]) -> None:
        del module
        maps = inputs[0].double()
        parts = torch.full_like(sums[0], maps[:, 0].numel()), maps.sum((0, 2, 3)), maps.square().sum((0, 2, 3))
        sums.add_(torch.stack([part.to(sums.device) for part in parts]))

    return add
