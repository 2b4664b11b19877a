"""The optimizer: AdamW over groups of parameters that share a learning rate and a weight decay."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def parameter_groups(
    model: nn.Module, *, lr: float, backbone_lr: float, weight_decay: float, layer_decay: float = 1.0
) -> list[dict]:
    """Groups for AdamW: the backbone has its own rate; biases, norms, tokens and position tables are not decayed.

    The published RT-DETR recipes pick the groups by patterns over parameter names, which miss some norms
    (``bn`` inside a longer name); here what is decayed are the matrices and kernels called ``weight``, but not those
    of a module that says ``undecayed = True``.

    Args:
        lr: of what lies outside ``model.backbone``.
        backbone_lr: of the backbone, with ``layer_decay`` of its last layer.
        layer_decay: each layer's rate over that of the next (BEiT, arXiv 2106.08254, section 3.2). Needs a backbone
            with ``depth`` and ``depth_of(name)``. 1 gives all layers the same rate.

    Raises:
        ValueError: layer-wise decay for a backbone whose layers are not numbered.
    """
    scale = layer_scale(model, layer_decay)
    exempt = tuple(f"{name}." for name, module in model.named_modules() if getattr(module, "undecayed", False))
    groups: dict[tuple[bool, float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            inside = name.startswith("backbone.")
            decayed = parameter.ndim > 1 and name.endswith("weight") and not name.startswith(exempt)
            groups.setdefault((inside, scale(name.removeprefix("backbone.")) if inside else 1.0, decayed), []).append(
                parameter
            )
    return [
        {
            "params": parameters,
            "lr": (backbone_lr if inside else lr) * factor,
            "weight_decay": weight_decay if decayed else 0.0,
            "name": ("backbone" if inside else "head") + ("" if decayed else ", not decayed"),
        }
        for (inside, factor, decayed), parameters in groups.items()
    ]


def layer_scale(model: nn.Module, decay: float) -> Callable[[str], float]:
    """From a parameter's name in the backbone to the factor of its learning rate."""
    if decay == 1.0:
        return lambda _: 1.0
    backbone = getattr(model, "backbone", None)
    if not hasattr(backbone, "depth_of"):
        raise ValueError(
            f"layer-wise learning-rate decay needs a backbone of numbered layers, {type(model).__name__} has none"
        )
    depth, depth_of = backbone.depth, backbone.depth_of  # type: ignore[union-attr]
    return lambda name: decay ** (depth - depth_of(name))


def make_optimizer(
    model: nn.Module, *, lr: float, backbone_lr: float, weight_decay: float, layer_decay: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.999),
) -> torch.optim.AdamW:  # fmt: skip
    """AdamW (arXiv 1711.05101) in its fused form, whose step can be skipped on the device."""
    groups = parameter_groups(model, lr=lr, backbone_lr=backbone_lr, weight_decay=weight_decay, layer_decay=layer_decay)
    return torch.optim.AdamW(groups, betas=betas, fused=True)
