"""What a run leaves as it is."""

from __future__ import annotations

import pytest
from torch import nn

from vitdet.engine.freezing import freeze
from vitdet.errors import UserError


def model() -> nn.Module:
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    return nn.ModuleDict(
        {"backbone": nn.ModuleDict({"layers": layers, "norm": nn.LayerNorm(2)}), "head": nn.Linear(2, 2)}
    )


def trained(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def test_a_linear_probe_trains_the_head_alone() -> None:
    module = model()
    assert freeze(module, ["backbone"]) == [module["backbone"]]
    assert trained(module) == {"head.weight", "head.bias"}


def test_nothing_is_frozen_unasked() -> None:
    module = model()
    assert freeze(module, []) == []
    assert trained(module) == {name for name, _ in module.named_parameters()}


def test_patterns_and_single_parameters() -> None:
    module = model()
    layers = module["backbone"]["layers"]
    assert freeze(module, ["backbone.layers.[01].*", "head.bias"]) == [layers[0], layers[1]]
    assert trained(module) == {"backbone.layers.2.weight", "backbone.layers.2.bias", "head.weight"} | {
        "backbone.norm.weight", "backbone.norm.bias",
    }  # fmt: skip


def test_a_part_that_is_not_there_is_told() -> None:
    with pytest.raises(UserError, match=r"train\.freeze names 'backbon', .* did you mean 'backbone'\?"):
        freeze(model(), ["backbon"])


def test_something_must_be_left() -> None:
    with pytest.raises(UserError, match=r"\['backbone', 'head'\] leaves nothing to train; name fewer parts"):
        freeze(model(), ["backbone", "head"])
