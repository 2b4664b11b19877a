"""A detector's backbone from a classifier's file in its publisher's layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from tests.engine.tiny import tiny_values, write_set
from vitdet import create_model
from vitdet.backbones.hgnetv2 import hgnetv2_b0, hgnetv2_b4, hgnetv2_pico
from vitdet.backbones.pyramid import Pyramid
from vitdet.backbones.resnet import ResNet, resnet18_vd, resnet50, resnet50_vd
from vitdet.backbones.timm import TimmBackbone
from vitdet.backbones.vit import ViT
from vitdet.build import build_trainer, without_start
from vitdet.build.backbone_weights import load_backbone, trunk_of
from vitdet.config import check_config
from vitdet.engine.checkpoint import save_weights
from vitdet.errors import UserError
from vitdet.structures import ClassMap, ModelMetadata, Preprocessing

State = dict[str, Tensor]


class Detector(nn.Module):
    """What has a backbone."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.encoder = backbone, nn.Linear(2, 2)


def unlike(module: nn.Module) -> nn.Module:
    """Every value another than at the start: of norms, too."""
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) * 0.2 + 0.05)
    return module


def written(state: State, path: Path) -> Path:
    torch.save(state, path)
    return path


def test_torchvision_under_a_plain_resnet(tmp_path: Path) -> None:
    """The maps are torchvision's own, whose classifier it is; fixed norms count no batches."""
    theirs = unlike(torchvision.models.resnet50(weights=None)).eval()
    file = written(theirs.state_dict(), tmp_path / "resnet50-0676ba61.pth")
    model = Detector(resnet50(out_stages=(3,), frozen_norm=True)).eval()
    before = model.encoder.weight.clone()
    assert not load_backbone(model, file).reshaped
    with torch.no_grad():
        images = torch.randn(1, 3, 32, 32)
        maps = nn.Sequential(*list(theirs.children())[:-2])(images)
        torch.testing.assert_close(model.backbone(images)[-1], maps, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.encoder.weight, before)


def vd_state(backbone: ResNet) -> State:
    """The names of RT-DETR's PResNet, in which ResNet18_vd_pretrained_from_paddle.pth is written."""
    renamed = {}
    for name, tensor in backbone.state_dict().items():
        part, *rest = name.split(".")
        if part == "stem":
            new = f"conv1.conv1_{int(rest[0]) + 1}.{'.'.join(rest[1:])}"
        elif rest[2] == "convs":
            new = f"res_layers.{rest[0]}.blocks.{rest[1]}.branch2{'abc'[int(rest[3])]}.{'.'.join(rest[4:])}"
        elif rest[3] == "1":  # after an average pool
            new = f"res_layers.{rest[0]}.blocks.{rest[1]}.short.conv.{'.'.join(rest[4:])}"
        else:
            new = f"res_layers.{rest[0]}.blocks.{rest[1]}.short.{'.'.join(rest[3:])}"
        renamed[new] = tensor
    return renamed


@pytest.mark.parametrize("make", [resnet18_vd, resnet50_vd])
def test_resnet_vd_by_its_authors(tmp_path: Path, make: Callable[..., ResNet]) -> None:
    theirs = unlike(make())
    state = vd_state(theirs)
    for name in (
        "conv1.conv1_3.norm.running_var", "res_layers.0.blocks.0.short.conv.weight",
        "res_layers.3.blocks.0.short.conv.norm.bias", "res_layers.1.blocks.1.branch2b.conv.weight",
    ):  # fmt: skip
        assert name in state
    model = Detector(make())
    load_backbone(model, written(state, tmp_path / "ResNet_vd_pretrained_from_paddle.pth"))
    for name, tensor in theirs.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(model.backbone.state_dict()[name], tensor), name


@pytest.mark.parametrize(("name", "make"), [("hgnetv2_b0", hgnetv2_b0), ("hgnetv2_b4", hgnetv2_b4)])
def test_hgnetv2_of_timm(tmp_path: Path, name: str, make: Callable[..., nn.Module]) -> None:
    """Files of D-FINE's authors have the same names and no head; the maps are timm's."""
    theirs = unlike(timm.create_model(name)).eval()
    with torch.no_grad():
        images = torch.randn(1, 3, 32, 64)
        maps = theirs.forward_features(images)
        for state in (
            theirs.state_dict(),
            {key: value for key, value in theirs.state_dict().items() if not key.startswith("head.")},
        ):
            model = Detector(make()).eval()
            load_backbone(model, written(state, tmp_path / f"{name}.pth"))
            torch.testing.assert_close(model.backbone(images)[-1], maps, rtol=1e-4, atol=1e-4)


def test_narrow_hgnetv2_starts_from_b0(tmp_path: Path) -> None:
    """Pico is B0 without the last stage; of Atto the last stage has another width and other kernels."""
    theirs = unlike(timm.create_model("hgnetv2_b0"))
    file = written(theirs.state_dict(), tmp_path / "PPHGNetV2_B0_stage1.pth")
    model = Detector(hgnetv2_pico())
    report = load_backbone(model, file)
    assert not report.reshaped
    assert all(name.startswith(("stages.3.", "head.")) for name in report.unexpected)
    model = create_model("deimv2_atto", num_classes=3)
    report = load_backbone(model, file)
    assert {name.split(".")[1] for name, _, _ in report.reshaped} == {"2"}
    first, third = (f"stages.{n}.blocks.0.layers.0" for n in (1, 2))
    own, b0 = model.backbone.state_dict(), theirs.state_dict()
    assert torch.equal(own[f"{first}.conv.weight"], b0[f"{first}.conv.weight"])
    assert torch.equal(own[f"{third}.0.conv.weight"], b0[f"{third}.conv1.conv.weight"])  # the same shape in both
    assert own[f"{third}.1.conv.weight"].shape != b0[f"{third}.conv2.conv.weight"].shape


@pytest.mark.parametrize(
    ("name", "options"),
    [("convnext_atto", {}), ("vit_tiny_patch16_224", {"img_size": 32}), ("mobilenetv3_small_050", {})],
)
def test_any_of_timm(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """Its models of features have other names than its classifiers, and no heads."""
    theirs = unlike(timm.create_model(name, **options)).eval()
    model = Detector(TimmBackbone(name, **options)).eval()
    load_backbone(model, written(theirs.state_dict(), tmp_path / f"{name}.pth"))
    with torch.no_grad():
        images = torch.randn(1, 3, 32, 32)
        last = theirs.forward_intermediates(images, indices=1, intermediates_only=True, norm=False)[-1]
        torch.testing.assert_close(model.backbone(images)[-1], last, rtol=1e-3, atol=1e-3)


def test_a_vit_below_a_pyramid(tmp_path: Path) -> None:
    """From timm's file and from one of ours; without its norm where the detector's has none; for any size."""
    theirs = unlike(timm.create_model("vit_tiny_patch16_224"))
    file = written(theirs.state_dict(), tmp_path / "vit_tiny_patch16_224.augreg.pth")
    for norm in (True, False):
        numbers = {"width": 192, "layers": 12, "heads": 3, "hidden": 768, "image_size": (96, 128)}
        model = Detector(Pyramid(ViT(**numbers, final_norm=norm)))
        load_backbone(model, file)
        trunk = trunk_of(model)
        assert torch.equal(
            trunk.encoder.layers[3].feed_forward.expand.weight, theirs.state_dict()["blocks.3.mlp.fc1.weight"]
        )
    ours = create_model("vit_tiny_patch16_224", num_classes=2)
    metadata = ModelMetadata(
        "vit_tiny_patch16_224", {"num_classes": 2}, ClassMap((1, 2), ("a", "b")), Preprocessing((224, 224))
    )
    save_weights(tmp_path / "ours.safetensors", unlike(ours), metadata)
    load_backbone(model, tmp_path / "ours.safetensors")
    assert torch.equal(
        trunk_of(model).encoder.layers[0].feed_forward.expand.weight,
        ours.backbone.encoder.layers[0].feed_forward.expand.weight,
    )


def test_what_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    b0 = written(timm.create_model("hgnetv2_b0").state_dict(), tmp_path / "b0.pth")
    plain = written(torchvision.models.resnet18(weights=None).state_dict(), tmp_path / "resnet18-f37072fd.pth")
    for make, file, why in (
        (hgnetv2_b4, b0, "the weights do not fit HGNetV2"),
        (hgnetv2_b0, plain, "no HGNetV2's"),
        (resnet18_vd, plain, "the weights do not fit ResNet"),
        (resnet18_vd, b0, "no plain ResNet's"),
        (resnet18_vd, tmp_path / "lost.pth", "there is no"),
    ):
        model = Detector(make())
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(UserError, match=why) as error:
            load_backbone(model, file)
        assert str(error.value).startswith(f"model.backbone_weights {file} cannot be used: ")
        assert "\n" not in str(error.value)
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(UserError, match=r"has no backbone; use model\.weights"):
        load_backbone(nn.Linear(2, 2), plain)


def test_a_stage_is_not_lost_silently(tmp_path: Path) -> None:
    state = timm.create_model("hgnetv2_b0").state_dict()
    cut = {name: tensor for name, tensor in state.items() if not name.startswith("stages.2.blocks.1.")}
    with pytest.raises(UserError, match=r"missing: .*stages\.2\.blocks\.1\."):
        load_backbone(Detector(hgnetv2_b0()), written(cut, tmp_path / "cut.pth"))


def test_a_run_starts_from_it(tmp_path: Path) -> None:
    values = tiny_values(write_set(tmp_path / "tiny"), tmp_path / "run")
    state = vd_state(unlike(create_model("rtdetr_r18", num_classes=2).backbone))
    file = written(state, tmp_path / "vd.pth")
    values["model"] |= {"name": "rtdetr_r18", "backbone_weights": str(file)}
    config = check_config(values)
    trainer = build_trainer(config)
    assert torch.equal(trainer.bare_model.backbone.stem[0].conv.weight, state["conv1.conv1_1.conv.weight"])
    again = without_start(config, trainer.metadata.to_dict())  # a run is resumed without the file
    assert (again.model.backbone_weights, again.data.mean) == (None, (0.0, 0.0, 0.0))
    values["model"]["weights"] = str(file)
    with pytest.raises(ValueError, match="weights and backbone_weights"):
        check_config(values)
