"""Which parameters are decayed, and at which rate each learns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vitdet import create_model
from vitdet.engine.optim import make_optimizer, parameter_groups

RATES = {"lr": 1e-3, "backbone_lr": 1e-4, "weight_decay": 0.05}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return create_model("rtdetr_nano", num_classes=2)


def test_every_parameter_is_in_one_group(model: nn.Module) -> None:
    members = [id(p) for group in parameter_groups(model, **RATES) for p in group["params"]]
    assert sorted(members) == sorted(id(p) for p in model.parameters())


def test_norms_and_biases_are_not_decayed(model: nn.Module) -> None:
    decay = {id(p): group["weight_decay"] for group in parameter_groups(model, **RATES) for p in group["params"]}
    norms = (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)
    counted = {"norm": 0, "bias": 0, "weight": 0}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            kind = "norm" if isinstance(module, norms) else "bias" if name.endswith("bias") else "weight"
            assert decay[id(parameter)] == (0.05 if kind == "weight" else 0.0), (module, name)
            counted[kind] += 1
    assert all(counted.values())


def test_the_backbone_has_its_own_rate(model: nn.Module) -> None:
    rate = {id(p): group["lr"] for group in parameter_groups(model, **RATES) for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert rate[id(parameter)] == (1e-4 if name.startswith("backbone.") else 1e-3), name


def test_groups_are_named_and_frozen_parameters_left_out() -> None:
    model = nn.ModuleDict({"backbone": nn.Linear(2, 2), "encoder": nn.Linear(2, 2)})
    model["encoder"].bias.requires_grad_(False)
    groups = parameter_groups(model, **RATES)
    assert {group["name"]: (group["lr"], group["weight_decay"], len(group["params"])) for group in groups} == {
        "backbone": (1e-4, 0.05, 1),
        "backbone, not decayed": (1e-4, 0.0, 1),
        "head": (1e-3, 0.05, 1),
    }


def test_a_step_is_adamw() -> None:
    """The first step moves every weight by lr against its gradient's sign, after the decay (arXiv 1711.05101)."""
    layer = nn.Linear(3, 1)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    optimizer = make_optimizer(layer, lr=0.1, backbone_lr=0.1, weight_decay=0.5)
    layer(torch.tensor([[1.0, -2.0, 3.0]])).sum().backward()
    optimizer.step()
    expected = weight * (1 - 0.1 * 0.5) - 0.1 * torch.tensor([[1.0, -1.0, 1.0]])
    torch.testing.assert_close(layer.weight.detach(), expected)
    torch.testing.assert_close(layer.bias.detach(), bias - 0.1)


def test_each_layer_learns_at_its_own_rate() -> None:
    """The last norm at the backbone's rate, each layer below at a share of the one above (arXiv 2106.08254)."""
    model = create_model("vit_tiny_patch16_224", num_classes=2, layers=3)
    groups = parameter_groups(model, **RATES, layer_decay=0.5)
    rate = {id(p): group["lr"] for group in groups for p in group["params"]}
    names = dict(model.named_parameters())
    assert len(rate) == len(names)
    expected = {
        "backbone.encoder.norm.weight": 1e-4,
        "backbone.patch_embedding.project.weight": 1e-4 / 16,
        "head.bias": 1e-3,
    }
    expected |= {f"backbone.encoder.layers.{n}.feed_forward.expand.weight": 1e-4 / 2 ** (3 - n) for n in range(3)}
    for name, value in expected.items():
        assert rate[id(names[name])] == pytest.approx(value), name
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    for name, parameter in names.items():
        tokens = name.endswith(("class_token", "positions.table"))
        assert (id(parameter) in decayed) == (parameter.ndim > 1 and not tokens), name


def test_layer_decay_needs_numbered_layers() -> None:
    with pytest.raises(ValueError, match="needs a backbone of numbered layers"):
        parameter_groups(nn.Linear(2, 2), **RATES, layer_decay=0.5)


def test_what_says_so_is_not_decayed() -> None:
    """Swin v2's network of position biases, as published."""
    model = create_model("swinv2_tiny_window8_256", num_classes=2)
    groups = parameter_groups(model, **RATES)
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    mlp = [p for name, p in model.named_parameters() if ".position_bias.mlp." in name]
    assert len(mlp) > 12
    assert not decayed & {id(p) for p in mlp}
