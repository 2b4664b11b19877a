from __future__ import annotations

import pytest
import torch

from vitdet.backbones.timm import TimmBackbone, create_timm, timm_classifier, timm_preprocessing
from vitdet.structures import Preprocessing

timm = pytest.importorskip("timm")


@pytest.mark.parametrize(
    ("name", "arguments", "channels", "strides"),
    [
        ("resnet10t", {"out_indices": [2, 3, 4]}, [128, 256, 512], [8, 16, 32]),
        ("timm/convnext_atto", {}, [40, 80, 160, 320], [4, 8, 16, 32]),
        # These two give channels last, and one map a block.
        ("swin_tiny_patch4_window7_224", {"img_size": 64, "window_size": 2}, [96, 192, 384, 768], [4, 8, 16, 32]),
        ("vit_tiny_patch16_224", {"img_size": 64, "out_indices": (3, 11)}, [192, 192], [16, 16]),
    ],
)
def test_maps_have_the_shapes_that_are_told(
    name: str, arguments: dict[str, object], channels: list[int], strides: list[int]
) -> None:
    backbone = TimmBackbone(name, **arguments).eval()
    assert (backbone.channels, backbone.strides) == (channels, strides)
    with torch.no_grad():
        maps = backbone(torch.randn(1, 3, 64, 64))
    assert [tuple(m.shape) for m in maps] == [(1, c, 64 // s, 64 // s) for c, s in zip(channels, strides, strict=True)]


def test_values_are_timms() -> None:
    backbone = TimmBackbone("swin_tiny_patch4_window7_224", img_size=64, window_size=2).eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        for ours, theirs in zip(backbone(images), backbone.model(images), strict=True):
            assert torch.equal(ours, theirs.permute(0, 3, 1, 2))


def test_classifier_equals_timms() -> None:
    ours = timm_classifier("timm/resnet10t", 5, drop_rate=0.1).eval()
    theirs = timm.create_model("resnet10t", num_classes=5).eval()
    theirs.load_state_dict(ours.model.state_dict())
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images))
        torch.testing.assert_close(theirs.fc(ours.features(images)), theirs(images))
    assert (ours.num_classes, ours.stride) == (5, 1)
    assert ours.model.drop_rate == 0.1


def test_patches_set_the_stride() -> None:
    assert timm_classifier("vit_tiny_patch16_224", 2, depth=1).stride == 16


def test_without_classes_there_are_the_features() -> None:
    model = timm_classifier("resnet10t", 0).eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(images), model.features(images))


def test_buffers_outside_the_state_dict_survive_the_meta_device() -> None:
    arguments = {"img_size": 64, "window_size": 2, "embed_dim": 24, "depths": (1, 1, 1, 1)}
    whole = timm_classifier("swin_tiny_patch4_window7_224", 3, **arguments).eval()
    with torch.device("meta"):
        filled = timm_classifier("swin_tiny_patch4_window7_224", 3, **arguments).eval()
    filled.load_state_dict(whole.state_dict(), assign=True)
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(filled(images), whole(images))


@pytest.mark.parametrize(
    "name", ["vit_base_patch16_224.augreg_in21k", "resnet10t", "timm/swin_tiny_patch4_window7_224"]
)
def test_preprocessing_is_the_published_one(name: str) -> None:
    said = Preprocessing(**timm_preprocessing(name))
    published = timm.get_pretrained_cfg(name.removeprefix("timm/"))
    assert said.size == published.input_size[1:]
    assert (said.mean, said.std) == (published.mean, published.std)
    assert (said.interpolation, said.crop) == (published.interpolation, published.crop_pct)


def test_stretched_images_are_not_cropped() -> None:
    name = "coat_lite_medium_384.in1k"
    assert timm.get_pretrained_cfg(name).crop_mode == "squash"
    assert timm_preprocessing(name)["crop"] is None


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("resnet18x", {}, "timm has no model 'resnet18x'; did you mean 'resnet18"),
        ("timm/vit_tiny_patch16_244", {}, "did you mean 'vit_tiny_patch16_224'"),
        ("resnet10t", {"colour": 1}, "timm cannot build 'resnet10t' with {'colour': 1}: "),
        ("resnet10t", {"features_only": True, "out_indices": (9,)}, "timm cannot build 'resnet10t'"),
    ],
)
def test_refused(name: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_timm(name, **arguments)


def test_no_preprocessing_to_tell() -> None:
    with pytest.raises(
        ValueError, match="timm says no preprocessing for 'resnet18x'; give mean, std and size yourself"
    ):
        timm_preprocessing("resnet18x")


@pytest.mark.parametrize("key", ["pretrained", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"])
def test_a_files_header_cannot_make_timm_fetch_or_read(key: str) -> None:
    with pytest.raises(ValueError, match=rf"{key} is not for a model's arguments; name weights as"):
        timm_classifier("resnet10t", 2, **{key: "x"})


def test_arguments_that_only_sound_like_fetching() -> None:
    """Swin v2's windows of pre-training are numbers."""
    model = timm_classifier(
        "swinv2_tiny_window8_256", 2, embed_dim=12, depths=(1, 1), num_heads=(1, 1), pretrained_window_sizes=(4, 4)
    )
    assert model.num_classes == 2
