"""The optimizer: AdamW over four groups, backbone or not, decayed or not."""

from __future__ import annotations

import torch
from torch import nn


def parameter_groups(model: nn.Module, *, lr: float, backbone_lr: float, weight_decay: float) -> list[dict]:
    """Groups for AdamW: the backbone has its own rate; biases, norms and other vectors are not decayed.

    The published RT-DETR recipes pick the groups by patterns over parameter names, which miss some norms
    (``bn`` inside a longer name); here the parameter's shape decides.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = (name.startswith("backbone."), parameter.ndim > 1)
            groups.setdefault(key, []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": backbone_lr if in_backbone else lr,
            "weight_decay": weight_decay if decayed else 0.0,
            "name": f"{'backbone' if in_backbone else 'head'}{'' if decayed else ', not decayed'}",
        }
        for (in_backbone, decayed), parameters in groups.items()
    ]


def make_optimizer(
    model: nn.Module, *, lr: float, backbone_lr: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) in its fused form, whose step can be skipped on the device."""
    groups = parameter_groups(model, lr=lr, backbone_lr=backbone_lr, weight_decay=weight_decay)
    return torch.optim.AdamW(groups, betas=betas, fused=True)
