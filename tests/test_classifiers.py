"""Pooling and heads; that the whole equals the published classifiers is tested in parity/."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdet.backbones.swin import Swin
from vitdet.backbones.vit import ViT
from vitdet.classifiers import CLASSIFIERS, AttentionPool, Classifier

WIDTH = 16
TOKENS = torch.randn(3, 2 + 6, WIDTH, generator=torch.Generator().manual_seed(0))


class Given(nn.Module):
    """A backbone of two prefix tokens whose tokens are always the same."""

    channels, strides, prefix_tokens = [WIDTH], [8], 2

    def tokens(self, images: Tensor) -> Tensor:
        return TOKENS


def features(**options: Any) -> Tensor:
    return Classifier(Given(), num_classes=0, **options).eval()(torch.zeros(3, 3, 8, 8))


def test_pooling_by_hand() -> None:
    average = TOKENS[:, 2:].sum(dim=1) / 6
    torch.testing.assert_close(features(pooling="token"), TOKENS[:, 0])
    torch.testing.assert_close(features(pooling="average"), average)
    torch.testing.assert_close(features(pooling="token_and_average"), torch.cat([TOKENS[:, 0], average], dim=1))
    normed = (average - average.mean(1, keepdim=True)) / average.var(1, correction=0, keepdim=True).add(1e-6).sqrt()
    torch.testing.assert_close(features(pooling="average", norm_pooled=True), normed)


@torch.no_grad()
def test_attention_pooling_by_hand() -> None:
    model = Classifier(Given(), num_classes=0, pooling="attention", pooling_heads=2).eval()
    pool = model.pool
    for parameter in pool.parameters():
        parameter.copy_(0.3 * torch.randn_like(parameter))
    weight, bias = pool.attention.qkv.weight.view(3, 2, 8, WIDTH), pool.attention.qkv.bias.view(3, 2, 8)
    patches = TOKENS[:, 2:]
    query = torch.einsum("hdc,c->hd", weight[0], pool.query[0, 0]) + bias[0]
    keys, values = (torch.einsum("hdc,bnc->bnhd", weight[i], patches) + bias[i] for i in (1, 2))
    shares = (torch.einsum("hd,bnhd->bhn", query, keys) / 8**0.5).softmax(-1)
    pooled = pool.attention.out(torch.einsum("bhn,bnhd->bhd", shares, values).flatten(1))
    norm = pool.feed_forward_residual.norm
    inner = F.gelu(pool.feed_forward.expand(F.layer_norm(pooled, (WIDTH,), norm.weight, norm.bias, eps=1e-6)))
    expected = pooled + pool.feed_forward.contract(inner)
    torch.testing.assert_close(model(torch.zeros(3, 3, 8, 8)), expected)
    order = torch.randperm(6)
    torch.testing.assert_close(pool(patches[:, order]), expected, msg="the order of the tokens must not matter")


def test_heads_of_attention_pooling_are_64_wide() -> None:
    wide = nn.Module()
    wide.channels, wide.strides, wide.prefix_tokens = [192], [16], 1  # type: ignore[assignment]
    assert Classifier(wide, num_classes=0, pooling="attention").pool.attention.heads == 3
    assert AttentionPool(16, 4, 8).attention.heads == 4


def test_head() -> None:
    model = Classifier(Given(), num_classes=7, representation=5).eval()
    images = torch.zeros(3, 3, 8, 8)
    hidden = torch.tanh(TOKENS[:, 0] @ model.representation.weight.T + model.representation.bias)
    torch.testing.assert_close(model.features(images), hidden)
    torch.testing.assert_close(model(images), hidden @ model.head.weight.T + model.head.bias)
    assert (model.num_classes, model.stride, model.prefix_tokens) == (7, 8, 2)
    fresh = Classifier(Given(), num_classes=1000)
    assert fresh.head.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not fresh.head.bias.any()
    assert "head.weight" not in Classifier(Given(), num_classes=0).state_dict()


def test_dropout_is_of_the_features_in_training() -> None:
    model = Classifier(Given(), num_classes=4, dropout=0.5)
    with torch.no_grad():
        model.head.weight.copy_(torch.eye(4, WIDTH))
    logits = model(torch.zeros(3, 3, 8, 8))
    kept = logits != 0
    assert 0 < kept.float().mean() < 1
    torch.testing.assert_close(logits, torch.where(kept, 2 * TOKENS[:, 0, :4], 0.0))
    torch.testing.assert_close(model.eval()(torch.zeros(3, 3, 8, 8)), TOKENS[:, 0, :4])


def small_vit(**overrides: Any) -> ViT:
    return ViT(
        **{"width": WIDTH, "layers": 2, "heads": 2, "hidden": 32, "patch": 8, "image_size": (24, 24)} | overrides
    )


@torch.no_grad()
def test_distillation_has_a_head_of_its_own() -> None:
    """Two answers in training, each from its own token by its own head; their mean in evaluation."""
    model, images = Classifier(small_vit(distillation_token=True), num_classes=5), torch.randn(2, 3, 24, 24)
    tokens = model.backbone.tokens(images)
    both = torch.stack([model.head(tokens[:, 0]), model.head_distillation(tokens[:, 1])], dim=1)
    assert (both[:, 0] - both[:, 1]).abs().max() > 1e-3
    torch.testing.assert_close(model(images), both)
    torch.testing.assert_close(model.eval()(images), both.mean(dim=1))
    torch.testing.assert_close(model.features(images), tokens[:, :2].mean(dim=1))
    average = Classifier(small_vit(distillation_token=True), num_classes=5, pooling="average")
    assert average(images).shape == (2, 5)
    assert not hasattr(average, "head_distillation")


@torch.no_grad()
def test_looking_inside() -> None:
    vit = Classifier(small_vit(), num_classes=5).eval()
    images = torch.randn(1, 3, 24, 40)
    assert vit.grid(images) == (3, 5)
    for ours, theirs in zip(vit.attention_weights(images), vit.backbone.attention_weights(images), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="Given gives no attention_weights, which need global attention; use a ViT"):
        Classifier(Given(), num_classes=5).attention_weights(images)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="unknown pooling 'max'; use one of"):
        Classifier(Given(), num_classes=5, pooling="max")
    for backbone in (small_vit(class_token=False), small_vit(class_token=False, registers=2)):
        with pytest.raises(ValueError, match=r"pooling 'token' needs a class token, .* lacks; use 'average'"):
            Classifier(backbone, num_classes=5)


def test_names_say_what_is_built() -> None:
    """Patch or window and image size of every name are those of its model."""
    for name, build in CLASSIFIERS.items():
        backbone = build.keywords["backbone"]
        while isinstance(backbone, partial):
            backbone = backbone.func
        assert backbone in (ViT, Swin), name
        if backbone is ViT:
            assert f"_patch{build.keywords['patch']}_" in name
            height, width = build.keywords["image_size"]
            assert height == width
            assert f"_{height}" in name or "dino" in name


@torch.no_grad()
def test_builders_take_overrides_of_head_and_backbone() -> None:
    model = CLASSIFIERS["vit_tiny_patch16_224"](
        3, layers=1, patch=12, image_size=(36, 24), pooling="average", class_token=False, head_dropout=0.25,
        representation=7, drop_path=0.1,
    ).eval()  # fmt: skip
    assert model(torch.randn(1, 3, 36, 24)).shape == (1, 3)
    assert (model.dropout.p, model.stride, model.representation.out_features) == (0.25, 12, 7)
    with pytest.raises(TypeError, match="colour"):
        CLASSIFIERS["vit_tiny_patch16_224"](3, colour="red")


@torch.no_grad()
def test_plain_baseline() -> None:
    """Beyer et al.: 22 million parameters, none of them positions or tokens."""
    model = CLASSIFIERS["vit_small_patch16_224_plain"](1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(22.0e6, rel=0.01)
    assert model.prefix_tokens == 0
    assert not [name for name in model.state_dict() if "token" in name or "position" in name]
