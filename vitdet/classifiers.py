"""Image classifiers: a backbone's tokens, pooled, and a linear head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitdet.backbones.swin import SWIN
from vitdet.backbones.vit import ViT
from vitdet.core.attention import Attention
from vitdet.core.blocks import Residual
from vitdet.core.feedforward import FeedForward
from vitdet.core.norms import make_norm

POOLINGS = ("token", "average", "token_and_average", "attention")


class AttentionPool(nn.Module):
    """One learnt query that attends to the tokens, then a feed-forward branch: the MAP head of arXiv 2106.04560.

    Args:
        width: C. heads: of the attention. hidden: inner width of the feed-forward. norm_eps: of the norm before it.
    """

    def __init__(self, width: int, heads: int, hidden: int, *, norm_eps: float = 1e-6) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(1, 1, width))
        nn.init.trunc_normal_(self.query, std=width**-0.5)
        self.attention = Attention(width, heads)
        self.feed_forward = FeedForward(width, hidden)
        self.feed_forward_residual = Residual(width, placement="pre", norm_eps=norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N, C) to (B, C)."""
        pooled = self.attention(self.query.expand(tokens.shape[0], -1, -1), tokens)  # (B, 1, C)
        return self.feed_forward_residual(pooled, self.feed_forward)[:, 0]


class Classifier(nn.Module):
    """A backbone, a pooling of its tokens, and a linear layer.

    Args:
        backbone: a module that gives ``tokens(images)`` (B, prefix + N, C), ``prefix_tokens``, ``channels`` and
            ``strides``. With a distillation token, as its ``distillation_token`` says, there is a second head for it
            (arXiv 2012.12877).
        num_classes: K; with 0 there is no head, and the model gives the features.
        pooling: ``"token"``: the class token; ``"average"``: the mean of the tokens after the prefix;
            ``"token_and_average"``: both, one after the other, as DINOv2's linear heads take; ``"attention"``: see
            :class:`AttentionPool`, over those after the prefix.
        pooling_heads: of the attention pooling; one for 64 channels where not given.
        norm_pooled: normalise after pooling (MAE, arXiv 2111.06377, appendix A.1); the backbone should then not.
        norm_eps: of that norm and of the attention pooling's.
        dropout: of the features, in training.
        representation: width of a tanh layer before the head, which the first ViTs had when pre-trained
            (arXiv 2010.11929, section 3.1); None for none.
    """

    def __init__(
        self, backbone: Any, *, num_classes: int, pooling: str = "token", pooling_heads: int | None = None,
        norm_pooled: bool = False, norm_eps: float = 1e-6, dropout: float = 0.0, representation: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.backbone = backbone
        self.num_classes, self.pooling = num_classes, pooling
        self.stride: int = max(backbone.strides)
        self._check(pooling)
        width: int = backbone.channels[-1]
        if pooling == "attention":
            self.pool: nn.Module = AttentionPool(
                width, pooling_heads or max(width // 64, 1), 4 * width, norm_eps=norm_eps
            )
        width = 2 * width if pooling == "token_and_average" else width
        self.norm = make_norm("layer", width, eps=norm_eps) if norm_pooled else nn.Identity()
        self.representation: nn.Module = nn.Identity()
        if representation is not None:
            self.representation = nn.Linear(width, representation)
            width = representation
        self.dropout = nn.Dropout(dropout)
        self.distilled: bool = pooling == "token" and getattr(backbone, "distillation_token", None) is not None
        self.head = nn.Linear(width, num_classes) if num_classes else nn.Identity()
        if self.distilled and num_classes:
            self.head_distillation = nn.Linear(width, num_classes)
        self.reset_parameters()

    def _check(self, pooling: str) -> None:
        """Refuse a pooling that is unknown, or that the backbone has no token for."""
        if pooling not in POOLINGS:
            raise ValueError(f"unknown pooling {pooling!r}; use one of {list(POOLINGS)}")
        has_token = self.prefix_tokens and getattr(self.backbone, "class_token", self.backbone) is not None
        if pooling.startswith("token") and not has_token:
            raise ValueError(f"pooling {pooling!r} needs a class token, which this backbone lacks; use 'average'")

    def reset_parameters(self) -> None:
        """Truncated normal of deviation 0.02, zero bias, for the linear layers of the head."""
        for module in (self.representation, self.head, getattr(self, "head_distillation", None)):
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    @property
    def prefix_tokens(self) -> int:
        """How many of the backbone's tokens come before those of the patches."""
        return self.backbone.prefix_tokens

    def grid(self, images: Tensor) -> tuple[int, int]:
        """(h, w): rows and columns of the patches of such images."""
        return self._looking_inside("grid")(images)

    def attention_weights(self, images: Tensor) -> list[Tensor]:
        """The attention weights (B, H, prefix + N, prefix + N) of each of the L layers."""
        return self._looking_inside("attention_weights")(images)

    def _looking_inside(self, name: str) -> Callable[[Tensor], Any]:
        if not hasattr(self.backbone, name):
            raise ValueError(f"{type(self.backbone).__name__} gives no {name}, which need global attention; use a ViT")
        return getattr(self.backbone, name)

    def _pooled(self, images: Tensor) -> list[Tensor]:
        """What each head takes: (B, C), once, or twice with a distillation token."""
        tokens = self.backbone.tokens(images)  # (B, prefix + N, C)
        if self.pooling == "attention":
            pooled = [self.pool(tokens[:, self.prefix_tokens :])]
        elif self.pooling == "token":
            pooled = [tokens[:, index] for index in range(2 if self.distilled else 1)]
        else:
            average = tokens[:, self.prefix_tokens :].mean(dim=1)
            pooled = [average if self.pooling == "average" else torch.cat([tokens[:, 0], average], dim=-1)]
        return [self._represent(self.norm(part)) for part in pooled]

    def _represent(self, pooled: Tensor) -> Tensor:
        """Through the tanh layer, where there is one."""
        return pooled if isinstance(self.representation, nn.Identity) else self.representation(pooled).tanh()

    def features(self, images: Tensor) -> Tensor:
        """(B, 3, h, w) to (B, C): what the head sees (with a distillation token, the mean of what both see)."""
        pooled = self._pooled(images)
        return pooled[0] if len(pooled) == 1 else (pooled[0] + pooled[1]) / 2

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, h, w) to logits (B, K).

        With a distillation token (B, 2, K) in training, of the class and of the distillation head, and their mean in
        evaluation (arXiv 2012.12877, section 3). The features where there are no classes.
        """
        if self.num_classes == 0:
            return self.features(images)
        pooled = [self.dropout(part) for part in self._pooled(images)]
        if not self.distilled:
            return self.head(pooled[0])
        logits = torch.stack([self.head(pooled[0]), self.head_distillation(pooled[1])], dim=1)  # (B, 2, K)
        return logits if self.training else logits.mean(dim=1)


def classifier(
    num_classes: int, *, backbone: Callable[..., Any], pooling: str = "token", pooling_heads: int | None = None,
    norm_pooled: bool = False, head_dropout: float = 0.0, representation: int | None = None, **arguments: Any,
) -> Classifier:  # fmt: skip
    """A classifier from plain values: those named here are the head's, ``arguments`` the backbone's."""
    return Classifier(
        backbone(**arguments), num_classes=num_classes, pooling=pooling, pooling_heads=pooling_heads,
        norm_pooled=norm_pooled, dropout=head_dropout, representation=representation,
    )  # fmt: skip


# Width, layers, heads and inner width: Ti and S of DeiT (arXiv 2012.12877, table 1), M of DeiT III (arXiv 2204.07118,
# table 1), B, L and H of ViT (arXiv 2010.11929, table 1), g of DINOv2 (arXiv 2304.07193, table 17; its inner width is
# each half's of a gated feed-forward).
_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 192, "layers": 12, "heads": 3, "hidden": 768},
    "small": {"width": 384, "layers": 12, "heads": 6, "hidden": 1536},
    "medium": {"width": 512, "layers": 12, "heads": 8, "hidden": 2048},
    "base": {"width": 768, "layers": 12, "heads": 12, "hidden": 3072},
    "large": {"width": 1024, "layers": 24, "heads": 16, "hidden": 4096},
    "huge": {"width": 1280, "layers": 32, "heads": 16, "hidden": 5120},
    "giant": {"width": 1536, "layers": 40, "heads": 24, "hidden": 4096},
}


def _vit(size: str, patch: int, side: int, **more: Any) -> partial[Classifier]:
    """A ViT of one of the sizes on square images."""
    return partial(classifier, backbone=ViT, **_SIZES[size], patch=patch, image_size=(side, side), **more)


def _deit3(size: str, patch: int, side: int) -> partial[Classifier]:
    """DeiT III (arXiv 2204.07118): with layer scale."""
    return _vit(size, patch, side, layer_scale=1e-6)


def _dinov2(size: str, *, registers: int = 0) -> partial[Classifier]:
    """DINOv2 (arXiv 2304.07193) on 518 pixels, with the registers of arXiv 2309.16588 or without."""
    gated = {"activation": "swiglu"} if size == "giant" else {}
    return _vit(size, 14, 518, layer_scale=1e-5, registers=registers, **gated)


def _dinov3(size: str) -> partial[Classifier]:
    """DINOv3 (arXiv 2508.10104, section 3.1): rotary positions, four registers, keys without bias."""
    return _vit(size, 16, 256, positions="rotary", registers=4, layer_scale=1e-5, key_bias=False, norm_eps=1e-5)


# timm's names; called with the number of classes, and what is to differ of the arguments of `classifier` or backbone.
CLASSIFIERS: dict[str, partial[Classifier]] = {
    "vit_tiny_patch16_224": _vit("tiny", 16, 224),
    "vit_tiny_patch16_384": _vit("tiny", 16, 384),
    "vit_small_patch8_224": _vit("small", 8, 224),
    "vit_small_patch16_224": _vit("small", 16, 224),
    "vit_small_patch16_384": _vit("small", 16, 384),
    "vit_small_patch32_224": _vit("small", 32, 224),
    "vit_small_patch32_384": _vit("small", 32, 384),
    # The plain baseline (arXiv 2205.01580): average pooling, sine-cosine positions; not a name of timm's.
    "vit_small_patch16_224_plain": _vit("small", 16, 224, class_token=False, positions="sincos", pooling="average"),
    "vit_base_patch8_224": _vit("base", 8, 224),
    "vit_base_patch16_224": _vit("base", 16, 224),
    "vit_base_patch16_384": _vit("base", 16, 384),
    "vit_base_patch32_224": _vit("base", 32, 224),
    "vit_base_patch32_384": _vit("base", 32, 384),
    "vit_large_patch14_224": _vit("large", 14, 224),
    "vit_large_patch16_224": _vit("large", 16, 224),
    "vit_large_patch16_384": _vit("large", 16, 384),
    "vit_large_patch32_224": _vit("large", 32, 224),
    "vit_large_patch32_384": _vit("large", 32, 384),
    "vit_huge_patch14_224": _vit("huge", 14, 224),
    # DeiT (arXiv 2012.12877, table 1); distilled: with a second token and head (section 3).
    "deit_tiny_patch16_224": _vit("tiny", 16, 224),
    "deit_small_patch16_224": _vit("small", 16, 224),
    "deit_base_patch16_224": _vit("base", 16, 224),
    "deit_base_patch16_384": _vit("base", 16, 384),
    "deit_tiny_distilled_patch16_224": _vit("tiny", 16, 224, distillation_token=True),
    "deit_small_distilled_patch16_224": _vit("small", 16, 224, distillation_token=True),
    "deit_base_distilled_patch16_224": _vit("base", 16, 224, distillation_token=True),
    "deit_base_distilled_patch16_384": _vit("base", 16, 384, distillation_token=True),
    "deit3_small_patch16_224": _deit3("small", 16, 224),
    "deit3_small_patch16_384": _deit3("small", 16, 384),
    "deit3_medium_patch16_224": _deit3("medium", 16, 224),
    "deit3_base_patch16_224": _deit3("base", 16, 224),
    "deit3_base_patch16_384": _deit3("base", 16, 384),
    "deit3_large_patch16_224": _deit3("large", 16, 224),
    "deit3_large_patch16_384": _deit3("large", 16, 384),
    "deit3_huge_patch14_224": _deit3("huge", 14, 224),
    "vit_small_patch14_dinov2": _dinov2("small"),
    "vit_base_patch14_dinov2": _dinov2("base"),
    "vit_large_patch14_dinov2": _dinov2("large"),
    "vit_giant_patch14_dinov2": _dinov2("giant"),
    "vit_small_patch14_reg4_dinov2": _dinov2("small", registers=4),
    "vit_base_patch14_reg4_dinov2": _dinov2("base", registers=4),
    "vit_large_patch14_reg4_dinov2": _dinov2("large", registers=4),
    "vit_giant_patch14_reg4_dinov2": _dinov2("giant", registers=4),
    "vit_small_patch16_dinov3": _dinov3("small"),
    "vit_base_patch16_dinov3": _dinov3("base"),
    "vit_large_patch16_dinov3": _dinov3("large"),
    **{name: partial(classifier, backbone=swin, pooling="average") for name, swin in SWIN.items()},
}
