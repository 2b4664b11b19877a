"""Our ViT equals timm's, torchvision's and Hugging Face's when they hold the same weights: outputs, maps, gradients.

The weights are random, but no value that a fresh model has at 0 or 1 is left there (norms, biases, positions, scales),
or whole branches would be compared that do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitdet.classifiers import CLASSIFIERS, Classifier
from vitdet.weights.rules import load_strict
from vitdet.weights.vit import convert

timm = pytest.importorskip("timm", reason="the reference implementation is not installed")
torchvision = pytest.importorskip("torchvision", reason="the reference implementation is not installed")


def with_random_values(model: nn.Module) -> nn.Module:
    """Give every parameter a value that matters, at a size that keeps activations near 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1 and name.endswith("weight"):
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            elif name.endswith(("gamma", "gamma_1", "gamma_2", "lambda1")):
                parameter.copy_(0.5 + 0.2 * noise)
            elif name.endswith("weight"):  # of a norm
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(0.3 * noise)
    return model.eval()


def filled(name: str, state: dict[str, Tensor], *, num_classes: int, **overrides: Any) -> Classifier:
    """Our model, which has no values of its own, with the reference's: all of them must find their place."""
    with torch.device("meta"):
        model = CLASSIFIERS[name](num_classes, **overrides)
    load_strict(model, convert(state), assign=True)
    return model.eval()


def pictures(batch: int, height: int, width: int | None = None) -> Tensor:
    return torch.randn(batch, 3, height, width or height, generator=torch.Generator().manual_seed(1))


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


# ---------------------------------------------------------------------------------------------- timm


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        pytest.param("vit_tiny_patch16_224", 224, {}, id="tiny"),
        pytest.param("vit_small_patch16_224", 224, {}, id="small"),
        pytest.param("vit_base_patch16_224", 224, {}, id="base"),
        pytest.param("vit_small_patch14_dinov2", 518, {}, id="dinov2"),
        pytest.param("vit_small_patch14_dinov2", 224, {"dynamic_img_size": True}, id="dinov2 resampled"),
        pytest.param("vit_small_patch14_reg4_dinov2", 224, {"dynamic_img_size": True}, id="dinov2 registers"),
        pytest.param("deit_tiny_distilled_patch16_224", 224, {}, id="distilled"),
        pytest.param("deit3_small_patch16_224", 224, {"depth": 2}, id="deit3"),
        pytest.param("vit_small_patch16_dinov3", 256, {"global_pool": "token"}, id="dinov3"),
        pytest.param("vit_small_patch16_dinov3_qkvb", 192, {"global_pool": "token", "depth": 2}, id="dinov3 biases"),
    ],
)
@torch.no_grad()
def test_timm(name: str, size: int, options: dict[str, Any]) -> None:
    theirs = with_random_values(timm.create_model(name, **options))
    ours = filled(
        name.removesuffix("_qkvb"), theirs.state_dict(), num_classes=theirs.num_classes, layers=len(theirs.blocks)
    )
    images = pictures(1, size)
    assert_same(ours(images), theirs(images))


@pytest.mark.parametrize(
    ("options", "overrides"),
    [
        pytest.param(
            {"global_pool": "avg"}, {"pooling": "average", "norm_pooled": True, "final_norm": False}, id="average"
        ),
        pytest.param({"global_pool": "map"}, {"pooling": "attention"}, id="attention"),
        pytest.param({"qk_norm": True}, {"qk_norm": "layer"}, id="normed queries and keys"),
        pytest.param(
            {"reg_tokens": 2, "class_token": False, "global_pool": "avg", "fc_norm": False},
            {"class_token": False, "registers": 2, "pooling": "average"},
            id="positions of registers",
        ),
    ],
)
@torch.no_grad()
def test_timm_options(options: dict[str, Any], overrides: dict[str, Any]) -> None:
    theirs = with_random_values(timm.create_model("vit_tiny_patch16_224", depth=2, **options))
    ours = filled("vit_tiny_patch16_224", theirs.state_dict(), num_classes=1000, layers=2, **overrides)
    images = pictures(2, 224)
    assert_same(ours(images), theirs(images))


@torch.no_grad()
def test_timm_gated_feed_forward() -> None:
    """DINOv2's giant, narrowed: which half is the gate, and how wide it is."""
    small = {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 56}
    theirs = with_random_values(timm.create_model("vit_giant_patch14_dinov2", **small))
    ours = filled(
        "vit_giant_patch14_dinov2", theirs.state_dict(), num_classes=0, width=48, layers=2, heads=3, hidden=128,
        image_size=(56, 56),
    )  # fmt: skip
    assert_same(ours(pictures(2, 56)), theirs(pictures(2, 56)))


@torch.no_grad()
def test_timm_gate_of_its_own_in_dinov3() -> None:
    theirs = with_random_values(
        timm.create_model("vit_small_plus_patch16_dinov3", depth=1, embed_dim=48, num_heads=3, global_pool="token")
    )
    hidden = theirs.blocks[0].mlp.fc2.weight.shape[1]
    ours = filled(
        "vit_small_patch16_dinov3", theirs.state_dict(), num_classes=0, width=48, layers=1, heads=3, hidden=hidden,
        activation="swiglu",
    )  # fmt: skip
    assert_same(ours(pictures(2, 64, 96)), theirs(pictures(2, 64, 96)))


@torch.no_grad()
def test_timm_maps() -> None:
    """Feature maps of several blocks, at a size that is neither square nor the one of the positions."""
    theirs = with_random_values(timm.create_model("vit_tiny_patch16_224", depth=4, dynamic_img_size=True))
    ours = filled("vit_tiny_patch16_224", theirs.state_dict(), num_classes=1000, layers=4, out_layers=(1, 3)).backbone
    images = pictures(2, 96, 160)
    expected = theirs.forward_intermediates(images, indices=[1, 3], norm=True, intermediates_only=True)
    maps = ours(images)
    assert [tuple(one.shape) for one in maps] == [(2, 192, 6, 10)] * 2
    for one, other in zip(maps, expected, strict=True):
        assert_same(one, other)


def test_all_variants_have_timms_shapes() -> None:
    checked = 0
    for name, build in CLASSIFIERS.items():
        if not (name.startswith(("vit_", "deit")) and timm.is_model(name)):
            continue
        with torch.device("meta"):
            theirs = timm.create_model(name, **({} if "dinov3" in name else {"weight_init": "skip"}))  # sooner
            ours = build(theirs.num_classes)
        assert str(load_strict(ours, convert(theirs.state_dict()), assign=True)) == "all fit", name
        block = ours.backbone.encoder.layers[0]
        assert block.self_attention.heads == theirs.blocks[0].attn.num_heads, name
        norms = ours.backbone.encoder.norm, block.self_attention_residual.norm
        assert [norm.eps for norm in norms] == [theirs.norm.eps, theirs.blocks[0].norm1.eps], name
        grid = theirs.patch_embed.grid_size
        assert ours.backbone.positions is None or tuple(grid) == ours.backbone.positions.grid, name
        checked += 1
    assert checked >= 40


def test_fresh_values_are_distributed_as_timms() -> None:
    """Curves are compared with timm's: the same deviation in every tensor, the same zeros."""
    theirs = convert(timm.create_model("vit_tiny_patch16_224", depth=2).state_dict())
    ours = CLASSIFIERS["vit_tiny_patch16_224"](1000, layers=2).state_dict()
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name].mean(), expected.mean(), atol=0.006, rtol=0)
        torch.testing.assert_close(ours[name].std(), expected.std(), atol=1e-4, rtol=0.25)


# --------------------------------------------------------------------------------------- torchvision


@torch.no_grad()
def test_torchvision() -> None:
    theirs = with_random_values(torchvision.models.vit_b_16())
    ours = filled("vit_base_patch16_224", theirs.state_dict(), num_classes=1000)
    assert_same(ours(pictures(1, 224)), theirs(pictures(1, 224)))


def torchvision_small(**options: Any) -> nn.Module:
    """Their model, small."""
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=5, **options
    )


SMALL = {"width": 32, "layers": 2, "heads": 2, "hidden": 64, "patch": 8, "image_size": (32, 32)}


@torch.no_grad()
def test_torchvision_representation() -> None:
    theirs = with_random_values(torchvision_small(representation_size=24))
    ours = filled("vit_base_patch16_224", theirs.state_dict(), num_classes=5, representation=24, **SMALL)
    assert_same(ours(pictures(2, 32)), theirs(pictures(2, 32)))


# -------------------------------------------------------------------------------------- Hugging Face


def huggingface(kind: str, config: str, **options: Any) -> nn.Module:
    """Their model of this class, small unless ``options`` say otherwise."""
    transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")
    small = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32,
        "patch_size": 8, "num_labels": 5, "layer_norm_eps": 1e-6,
    }  # fmt: skip
    return with_random_values(getattr(transformers, kind)(getattr(transformers, config)(**{**small, **options})))


def file_of(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """What they write, whose names are not those in memory."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)  # type: ignore[operator]
    return load_file(folder / "model.safetensors")


@torch.no_grad()
def test_huggingface_vit() -> None:
    full = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "image_size": 224, "patch_size": 16}
    theirs = huggingface("ViTForImageClassification", "ViTConfig", num_hidden_layers=12, **full)
    ours = filled("vit_tiny_patch16_224", theirs.state_dict(), num_classes=5)
    assert_same(ours(pictures(1, 224)), theirs(pictures(1, 224)).logits)


HUGGINGFACE: dict[str, tuple[str, str, dict[str, Any], str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", {}, "vit_tiny_patch16_224", {}),
    "deit": (
        "DeiTForImageClassificationWithTeacher", "DeiTConfig", {}, "deit_tiny_distilled_patch16_224", {},
    ),
    "dinov2": (
        "Dinov2ForImageClassification", "Dinov2Config", {"mlp_ratio": 2}, "vit_small_patch14_dinov2",
        {"pooling": "token_and_average"},
    ),
    "dinov2 gated": (
        "Dinov2ForImageClassification", "Dinov2Config", {"mlp_ratio": 2, "use_swiglu_ffn": True},
        "vit_giant_patch14_dinov2", {"pooling": "token_and_average", "hidden": 48},
    ),
    "dinov2 registers": (
        "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig",
        {"mlp_ratio": 2, "num_register_tokens": 4}, "vit_small_patch14_reg4_dinov2", {"pooling": "token_and_average"},
    ),
    "dinov3": (
        "DINOv3ViTModel", "DINOv3ViTConfig", {"num_register_tokens": 4, "image_size": 48}, "vit_small_patch16_dinov3",
        {"norm_eps": 1e-6},
    ),
    "dinov3 gated": (
        "DINOv3ViTModel", "DINOv3ViTConfig", {"num_register_tokens": 4, "use_gated_mlp": True, "hidden_act": "silu"},
        "vit_small_patch16_dinov3", {"norm_eps": 1e-6, "activation": "swiglu"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HUGGINGFACE)
@torch.no_grad()
def test_huggingface(case: str, tmp_path: Path) -> None:
    kind, config, options, name, overrides = HUGGINGFACE[case]
    theirs = huggingface(kind, config, **options)
    classes = 5 if "Classification" in kind else 0
    images = pictures(2, options.get("image_size", 32))
    expected = theirs(images)
    in_memory, written = convert(theirs.state_dict()), file_of(theirs, tmp_path)
    assert set(written) != set(theirs.state_dict()), "this test is to read both spellings"
    ours = filled(name, written, num_classes=classes, **{**SMALL, **overrides})
    for key, value in convert(written).items():
        torch.testing.assert_close(value, in_memory[key], atol=0, rtol=0)
    if classes:
        assert_same(ours(images), expected.logits)
    else:
        assert_same(ours.backbone.tokens(images), expected.last_hidden_state)


# ----------------------------------------------------------------------------------------- gradients


def timm_small() -> nn.Module:
    return timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, mlp_ratio=2, num_classes=5, init_values=0.5
    )


REFERENCES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "timm": (lambda: with_random_values(timm_small()), "deit3_small_patch16_224"),
    "torchvision": (lambda: with_random_values(torchvision_small()), "vit_tiny_patch16_224"),
    "huggingface": (lambda: huggingface("ViTForImageClassification", "ViTConfig"), "vit_tiny_patch16_224"),
}


@pytest.mark.parametrize("case", REFERENCES)
def test_gradients(case: str) -> None:
    build, name = REFERENCES[case]
    theirs = build()
    ours = filled(name, theirs.state_dict(), num_classes=5, **SMALL)
    weights = torch.randn(3, 5)
    logits = theirs(pictures(3, 32))
    (getattr(logits, "logits", logits) * weights).sum().backward()
    (ours(pictures(3, 32)) * weights).sum().backward()
    # Our class token is the sum of theirs and its position: the derivative by a sum is that by either of the two.
    mapped = convert(
        {
            key: torch.zeros_like(parameter) if "cls_token" in key or "class_token" in key else parameter.grad
            for key, parameter in theirs.named_parameters()
        }
    )
    gradients = {key: parameter.grad for key, parameter in ours.named_parameters()}
    assert gradients.keys() == mapped.keys()
    for key, expected in mapped.items():
        # Softmax does not see what is added to all scores of a query, so the keys' biases have none but rounding.
        assert expected.abs().max() > 1e-3, key
        torch.testing.assert_close(
            gradients[key], expected, atol=1e-4, rtol=1e-4, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_gradients_with_rotary_positions_and_a_gate() -> None:
    """DINOv3: registers, layer scale, rotary positions, keys without bias, SwiGLU."""
    theirs = with_random_values(
        timm.create_model(
            "vit_small_plus_patch16_dinov3", depth=2, embed_dim=48, num_heads=3, global_pool="token", num_classes=5
        )
    )
    hidden = theirs.blocks[0].mlp.fc2.weight.shape[1]
    ours = filled(
        "vit_small_patch16_dinov3", theirs.state_dict(), num_classes=5, width=48, layers=2, heads=3, hidden=hidden,
        activation="swiglu",
    )  # fmt: skip
    images, weights = pictures(3, 64, 96), torch.randn(3, 5)
    for model in (ours, theirs):
        (model(images) * weights).sum().backward()
    expected = convert({name: parameter.grad for name, parameter in theirs.named_parameters()})
    lacking = {name for name in expected if name.endswith("qkv.bias")}  # theirs has none at all
    assert len(lacking) == 2
    for name, parameter in ours.named_parameters():
        if name not in lacking:
            torch.testing.assert_close(
                parameter.grad, expected[name], atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
