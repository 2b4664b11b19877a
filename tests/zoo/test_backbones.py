"""Any backbone under the detectors of RT-DETR's kind: by name, at any size, there and back through a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.tiny import tiny_values, write_set
from vitdet import create_model, load_model
from vitdet.backbones.pyramid import Pyramid
from vitdet.backbones.timm import TimmBackbone
from vitdet.backbones.vit import ViT
from vitdet.build import build_trainer
from vitdet.config import RunConfig
from vitdet.core.blocks import DropPath
from vitdet.engine.checkpoint import save_weights
from vitdet.engine.optim import parameter_groups
from vitdet.errors import UserError
from vitdet.structures import ClassMap, ModelMetadata, Preprocessing
from vitdet.zoo import DETECTORS, builder_arguments
from vitdet.zoo.backbones import CONVOLUTIONAL, make_backbone, strides_under

ALL, TWO, ONE = (8, 16, 32), (16, 32), (16,)
TAKING = [name for name, build in DETECTORS.items() if "backbone" in builder_arguments(build)]


@pytest.mark.parametrize("name", TAKING)
def test_the_published_backbones_have_these_strides(name: str) -> None:
    with torch.device("meta"):
        assert tuple(create_model(name).backbone.strides) == strides_under(name)


def test_who_takes_a_backbone() -> None:
    assert {name for name in DETECTORS if name.startswith(("rtdetr", "dfine", "deimv2"))} - {*TAKING} == {
        "rtdetr_vit_s"
    }
    assert [name for name in TAKING if name.startswith("detr")] == ["detr_r50"]


@pytest.mark.parametrize("strides", [ALL, TWO, ONE])
@pytest.mark.parametrize(
    "name",
    ["resnet18_vd", "resnet50", "hgnetv2_b0", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224",
     "swinv2_tiny_window8_256", "vit_small_patch16_dinov3", "timm/resnet10t", "timm/convnext_atto",
     "timm/vit_tiny_patch16_224", "timm/swin_tiny_patch4_window7_224"],
)  # fmt: skip
def test_maps_have_the_strides_at_any_size(name: str, strides: tuple[int, ...]) -> None:
    """And nothing in it is there for maps that nobody asked for: processes that train together would wait for it."""
    backbone = make_backbone(name, strides=strides)
    assert (tuple(backbone.strides), len(backbone.channels)) == (strides, len(strides))
    for height, width in [(64, 64), (96, 160)]:
        maps = backbone(torch.randn(2, 3, height, width))
        expected = [(2, c, height // s, width // s) for c, s in zip(backbone.channels, strides, strict=True)]
        assert [tuple(one.shape) for one in maps] == expected
    sum(one.sum() for one in maps).backward()
    assert [key for key, value in backbone.named_parameters() if value.grad is None] == []


@pytest.mark.parametrize("name", sorted(CONVOLUTIONAL))
def test_convolutional_ones_are_built(name: str) -> None:
    with torch.device("meta"):
        backbone = make_backbone(name, strides=ALL)
        maps = backbone(torch.empty(1, 3, 64, 96))
    assert [tuple(one.shape[1:]) for one in maps] == [
        (c, 64 // s, 96 // s) for c, s in zip(backbone.channels, ALL, strict=True)
    ]


@pytest.mark.parametrize(
    ("detector", "backbone"),
    [
        ("rtdetr_r18", "vit_tiny_patch16_224"),
        ("rtdetr_nano", "swin_tiny_patch4_window7_224"),
        ("rtdetrv2_r50_m", "resnet18_vd"),
        ("dfine_s", "timm/convnext_atto"),
        ("dfine_n", "vit_tiny_patch16_224"),
        ("dfine_x", "hgnetv2_b0"),
        ("deimv2_atto", "timm/resnet10t"),
        ("deimv2_s", "vit_tiny_patch16_224"),
    ],
)
def test_there_and_back_through_a_file(detector: str, backbone: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"num_classes": 2, "backbone": backbone, "num_queries": 10}
    model = create_model(detector, **arguments).eval()
    classes, prepared = ClassMap((1, 2), ("a", "b")), Preprocessing((64, 96))
    save_weights(tmp_path / "a.safetensors", model, ModelMetadata(detector, arguments, classes, prepared))
    again = load_model(tmp_path / "a.safetensors")
    assert again.metadata.arguments == arguments
    for size in [(64, 96), (128, 64)]:
        images = torch.randn(1, 3, *size)
        with torch.inference_mode():
            expected, found = model(images), again(images)
        assert found.logits.shape == (1, 10, 2)
        assert expected.logits.std() > 0
        torch.testing.assert_close(found.logits, expected.logits)
        torch.testing.assert_close(found.boxes, expected.boxes)


def test_positions_follow_the_images_size() -> None:
    """As if they had been resampled for that size once and for all."""
    backbone = make_backbone("vit_tiny_patch16_224", strides=ALL)
    assert isinstance(backbone, Pyramid)
    assert backbone.backbone.positions.grid == (14, 14)
    with torch.no_grad():
        backbone.backbone.positions.table.copy_(torch.randn(1, 14, 14, 192))
    fixed = create_model("vit_tiny_patch16_224", num_classes=0, image_size=(96, 160)).backbone
    fixed.load_state_dict(fixed.adapt(backbone.backbone.state_dict()))
    assert fixed.positions.grid == (6, 10)
    images = torch.randn(1, 3, 96, 160)
    with torch.no_grad():
        torch.testing.assert_close(backbone.backbone(images)[0], fixed(images)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "timm/resnet10t"])
def test_the_exported_graph_equals_the_model(name: str) -> None:
    backbone, images = make_backbone(name, strides=ALL).eval(), torch.randn(1, 3, 96, 64)
    program = torch.export.export(backbone, (images,))
    with torch.no_grad():
        for mine, exported in zip(backbone(images), program.module()(images), strict=True):
            torch.testing.assert_close(exported, mine, rtol=1e-4, atol=1e-4)


def test_a_run_with_another_backbone(tmp_path: Path) -> None:
    """From the YAML's ``model.overrides`` to the optimizer's groups and the file that is written."""
    values = tiny_values(write_set(tmp_path / "set"), tmp_path / "run")
    values["model"]["overrides"]["backbone"] = "vit_tiny_patch16_224"
    values["optim"] |= {"layer_decay": 0.5, "backbone_lr": 1.0}
    trainer = build_trainer(RunConfig.model_validate(values))
    rates = {group["lr"] for group in trainer.optimizer.param_groups if group["name"].startswith("backbone")}
    assert {round(rate * 2**13) for rate in rates} == {2**layer for layer in range(14)}
    save_weights(tmp_path / "a.safetensors", trainer.model, trainer.metadata)
    again = load_model(tmp_path / "a.safetensors")
    assert again.metadata.arguments["backbone"] == "vit_tiny_patch16_224"
    theirs = trainer.model.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in again.state_dict().items())


def test_rtdetr_vit_s_is_r34_on_a_vit() -> None:
    with torch.device("meta"):
        model, other = create_model("rtdetr_vit_s"), create_model("rtdetr_r34", backbone="vit_small_patch16_224")
    assert {key: value.shape for key, value in model.state_dict().items()} == {
        key: value.shape for key, value in other.state_dict().items()
    }
    assert sum(parameter.numel() for parameter in model.parameters()) // 10**6 == 34
    deeper = create_model("rtdetr_vit_s", drop_path=0.3, num_queries=5)
    rates = [module.rate for module in deeper.backbone.modules() if isinstance(module, DropPath)]
    assert max(rates) == pytest.approx(0.3)


@pytest.mark.parametrize("backbone", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_layer_wise_rates(backbone: str) -> None:
    """The first layers learn slowest; the pyramid, and norms of the maps, as the last."""
    model = create_model("rtdetr_r18", backbone=backbone)
    groups = parameter_groups(model, lr=1.0, backbone_lr=0.5, weight_decay=0.1, layer_decay=0.5)
    rate = {id(p): group["lr"] for group in groups for p in group["params"]}
    named = dict(model.named_parameters())
    if backbone.startswith("vit"):
        rates = {
            "backbone.backbone.patch_embedding.project.weight": 0.5 * 0.5**13,
            "backbone.backbone.positions.table": 0.5 * 0.5**13,
            "backbone.backbone.encoder.layers.0.feed_forward.expand.weight": 0.5 * 0.5**12,
            "backbone.backbone.encoder.layers.11.feed_forward.expand.weight": 0.5 * 0.5,
            "backbone.backbone.encoder.norm.weight": 0.5,
            "backbone.levels.0.0.weight": 0.5,
        }
    else:
        rates = {"backbone.embed.project.weight": 0.5 * 0.5**13, "backbone.out_norms.1.weight": 0.5}
    for name, expected in {**rates, "encoder.project.0.conv.weight": 1.0}.items():
        assert rate[id(named[name])] == pytest.approx(expected), name
    assert len(rate) == len(named)


def test_layer_wise_rates_need_layers() -> None:
    model = create_model("rtdetr_nano", backbone="hgnetv2_b0")
    with pytest.raises(ValueError, match="needs a backbone of numbered layers"):
        parameter_groups(model, lr=1.0, backbone_lr=0.5, weight_decay=0.1, layer_decay=0.5)


@pytest.mark.parametrize(
    ("detector", "arguments", "sentence"),
    [
        ("rtdetr_r18", {"backbone": "resnet50vd"}, r"there is no backbone 'resnet50vd'; did you mean 'resnet50_vd'\?"),
        ("rtdetr_r18", {"backbone": "rtdetr_r18"}, r"there is no backbone 'rtdetr_r18'"),
        ("rtdetr_r18", {"backbone": 3}, r"backbone is the name of a model, got 3"),
        ("rtdetr_r18", {"backbone": {"width": 10**9}}, r"backbone is the name of a model, got \{'width'"),
        ("rtdetr_r18", {"backbone": "vit_small_patch14_dinov2"}, r"has patches of 14, which give no maps of strides"),
        ("rtdetr_r18", {"backbone": "vit_small_patch8_224"}, r"has patches of 8, .* choose one with patches of 16"),
        ("rtdetr_r18", {"backbone": "timm/resnet10"}, r"timm has no model 'resnet10'; did you mean 'resnet10t'\?"),
        ("rtdetr_r18", {"backbone": "timm/hf_hub:one/two"}, r"timm has no model 'hf_hub:one/two'"),
        ("rtdetr_r18", {"backbone": "timm/local-dir:/etc"}, r"timm has no model 'local-dir:/etc'"),
        ("rtdetr_r18", {"backbone": "timm/beit_base_patch16_224"}, r"takes images of one size only"),
        ("rtdetr_r18", {"backbone": "timm/maxvit_tiny_tf_224"}, r"takes images of one size only"),
        ("rtdetr_r18", {"backbone": "timm/vit_7b_patch16_dinov3"}, r"has 6,716,022,784 parameters, .* at most 1,000"),
        ("rtdetr_r50", {"backbone": "resnet50_vd", "frozen_norm": True},
         r"frozen_norm is an argument of the published backbone, not of the one given; leave one out"),
        ("dfine_l", {"backbone": "resnet50_vd", "frozen_norm": True}, r"frozen_norm is an argument of the published"),
        ("deimv2_l", {"backbone": "resnet50_vd", "key_bias": True}, r"key_bias is an argument of the published"),
    ],
)  # fmt: skip
def test_what_cannot_stand_there(detector: str, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=rf"^model '{detector}' cannot be built with .*: '?.*{sentence}"):
        create_model(detector, **arguments)


@pytest.mark.parametrize("name", ["detr_r101", "rtdetr_vit_s", "vit_tiny_patch16_224"])
def test_others_take_none(name: str) -> None:
    with pytest.raises(UserError, match=rf"^model '{name}' has no argument 'backbone'"):
        create_model(name, backbone="resnet50_vd")


def test_none_is_the_published_one() -> None:
    with torch.device("meta"):
        assert "stem.2.conv.weight" in create_model("rtdetr_r18", backbone=None).backbone.state_dict()


def test_kinds() -> None:
    def kind(module: nn.Module) -> list[type]:
        return [type(module), *([type(module.backbone)] if isinstance(module, Pyramid) else [])]

    assert kind(make_backbone("vit_tiny_patch16_224", strides=ALL)) == [Pyramid, ViT]
    assert kind(make_backbone("vit_tiny_patch16_224", strides=ONE)) == [ViT]
    assert kind(make_backbone("timm/vit_tiny_patch16_224", strides=TWO)) == [Pyramid, TimmBackbone]
