"""Our Swin equals timm's, torchvision's and Hugging Face's when they hold the same weights: logits, maps, gradients.

The weights are random, but no value that a fresh model has at 0 or 1 is left there (norms, biases, tables).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdet.backbones.swin import SWIN, Swin
from vitdet.classifiers import Classifier
from vitdet.weights.rules import load_strict
from vitdet.weights.swin import convert

SMALL = {"width": 24, "depths": (1, 2, 3, 1), "heads": (2, 2, 4, 4)}
TIMM_SMALL = {"embed_dim": 24, "depths": (1, 2, 3, 1), "num_heads": (2, 2, 4, 4)}


def with_random_values(model: nn.Module) -> nn.Module:
    """Give every parameter a value that matters, at a size that keeps activations near 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Two pieces of a shifted window part by -100 there and by a mask here: far from it scores must stay.
            deviation = 0.2 if parameter.ndim == 1 or name.endswith(("table", "logit_scale")) else 0.04
            parameter.add_(deviation * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def filled(backbone: Swin, reference: nn.Module, *, num_classes: int) -> Classifier:
    """Our classifier with the reference's weights, all of which must find their place."""
    model = Classifier(backbone, num_classes=num_classes, pooling="average")
    load_strict(model, convert(reference.state_dict()))
    return model.eval()


def pictures(batch: int, size: tuple[int, int] | int) -> Tensor:
    sides = (size, size) if isinstance(size, int) else size
    return torch.randn(batch, 3, *sides, generator=torch.Generator().manual_seed(1))


def assert_same_logits(ours: nn.Module, theirs: nn.Module, images: Tensor) -> None:
    with torch.no_grad():
        logits = theirs(images)
        logits = getattr(logits, "logits", logits)
        assert logits.std() > 0.1
        torch.testing.assert_close(ours(images), logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_timm(name: str) -> None:
    timm = pytest.importorskip("timm")
    theirs = with_random_values(timm.create_model(name))
    assert_same_logits(filled(SWIN[name](), theirs, num_classes=1000), theirs, pictures(1, int(name[-3:])))


@pytest.mark.parametrize(
    ("name", "window", "size"),
    [
        pytest.param("swin_tiny_patch4_window7_224", 4, (64, 128), id="v1"),
        pytest.param("swin_tiny_patch4_window7_224", 7, (224, 160), id="v1 cut windows"),
        pytest.param("swinv2_tiny_window8_256", 4, (128, 64), id="v2"),
        pytest.param("swinv2_tiny_window16_256", 16, (256, 256), id="v2 last stage of one window"),
    ],
)
def test_timm_at_another_window_and_size(name: str, window: int, size: tuple[int, int]) -> None:
    timm = pytest.importorskip("timm")
    # 7 does not divide 40 and 20 columns: there timm shifts before it pads, so only blocks without a shift can agree.
    numbers = {"depths": (1, 1, 1, 1)} if size == (224, 160) else {}
    theirs = with_random_values(
        timm.create_model(name, img_size=size, window_size=window, num_classes=5, **{**TIMM_SMALL, **numbers})
    )
    ours = SWIN[name](window=window, image_size=size, **{**SMALL, **numbers})
    assert_same_logits(filled(ours, theirs, num_classes=5), theirs, pictures(2, size))


def test_timm_enlarged_windows() -> None:
    timm = pytest.importorskip("timm")
    name = "swinv2_base_window12to16_192to256"
    theirs = with_random_values(timm.create_model(name, num_classes=5, **TIMM_SMALL))
    assert_same_logits(filled(SWIN[name](**SMALL), theirs, num_classes=5), theirs, pictures(1, 256))


@pytest.mark.parametrize("version", [1, 2])
def test_timm_gradients(version: int) -> None:
    timm = pytest.importorskip("timm")
    name = "swin_tiny_patch4_window7_224" if version == 1 else "swinv2_tiny_window8_256"
    theirs = with_random_values(timm.create_model(name, img_size=64, window_size=4, num_classes=5, **TIMM_SMALL))
    ours = filled(SWIN[name](window=4, image_size=(64, 64), **SMALL), theirs, num_classes=5)
    images, labels = pictures(3, 64), torch.tensor([0, 3, 4])
    for model in (ours, theirs):
        F.cross_entropy(model(images), labels).backward()
    gradients = convert({name: parameter.grad for name, parameter in theirs.named_parameters()})
    mine = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert mine.keys() == gradients.keys()
    for key, gradient in mine.items():
        torch.testing.assert_close(gradient, gradients[key], atol=1e-5, rtol=1e-4, msg=lambda m, key=key: f"{key}: {m}")


def test_timm_maps_of_all_stages() -> None:
    timm = pytest.importorskip("timm")
    name, numbers = "swin_tiny_patch4_window7_224", {"img_size": 64, "window_size": 4, **TIMM_SMALL}
    whole = with_random_values(timm.create_model(name, num_classes=5, **numbers))
    theirs = timm.create_model(name, features_only=True, **numbers).eval()
    renamed = {key.replace("layers.", "layers_", 1): tensor for key, tensor in whole.state_dict().items()}
    missing, _ = theirs.load_state_dict(renamed, strict=False)
    assert not missing
    ours = filled(SWIN[name](window=4, image_size=(64, 64), **SMALL), whole, num_classes=5)
    images = pictures(2, 64)
    with torch.no_grad():
        for mine, reference in zip(ours.backbone(images), theirs(images), strict=True):
            torch.testing.assert_close(mine, reference.permute(0, 3, 1, 2), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param("swin_t", (224, 224), id="v1"),
        pytest.param("swin_t", (232, 264), id="v1 padded"),  # neither 7 nor 2 divides its maps
        pytest.param("swin_v2_t", (256, 256), id="v2"),
    ],
)
def test_torchvision(name: str, size: tuple[int, int]) -> None:
    models = pytest.importorskip("torchvision").models
    theirs = with_random_values(getattr(models, name)(weights=None))
    ours = SWIN["swinv2_tiny_window8_256" if "v2" in name else "swin_tiny_patch4_window7_224"]()
    assert_same_logits(filled(ours, theirs, num_classes=1000), theirs, pictures(1, size))


@pytest.mark.parametrize(
    ("version", "numbers", "size"),
    [
        pytest.param(1, {}, 224, id="v1 published numbers"),
        pytest.param(1, {"embed_dim": 24, "num_heads": [2, 2, 4, 4], "window_size": 4}, (144, 176), id="v1 padded"),
        pytest.param(2, {"window_size": 8, "image_size": 256}, 256, id="v2 published numbers"),
    ],
)
def test_hugging_face(version: int, numbers: dict[str, object], size: tuple[int, int] | int) -> None:
    transformers = pytest.importorskip("transformers")
    kind = "Swin" if version == 1 else "Swinv2"
    config = getattr(transformers, f"{kind}Config")(num_labels=5, **numbers)
    theirs = with_random_values(getattr(transformers, f"{kind}ForImageClassification")(config))
    ours = Swin(
        version=version, width=config.embed_dim, depths=config.depths, heads=config.num_heads,
        window=config.window_size, image_size=(config.image_size,) * 2,
    )  # fmt: skip
    assert_same_logits(filled(ours, theirs, num_classes=5), theirs, pictures(1, size))


def test_torchvision_gradients() -> None:
    models = pytest.importorskip("torchvision").models
    numbers = {"embed_dim": 24, "depths": [1, 1], "num_heads": [2, 2], "window_size": [4, 4], "num_classes": 5}
    theirs = with_random_values(models.SwinTransformer(patch_size=[4, 4], stochastic_depth_prob=0.0, **numbers))
    swin = Swin(width=24, depths=(1, 1), heads=(2, 2), window=4, image_size=(64, 64), out_stages=(0, 1))
    ours = filled(swin, theirs, num_classes=5)
    images, labels = pictures(3, 64), torch.tensor([0, 3, 4])
    for model in (ours, theirs):
        F.cross_entropy(model(images), labels).backward()
    gradients = convert({name: parameter.grad for name, parameter in theirs.named_parameters()})
    for key, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[key], atol=1e-5, rtol=1e-4, msg=lambda m, k=key: f"{k}: {m}"
        )
