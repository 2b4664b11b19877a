"""DEIMv2 (arXiv 2509.20787): D-FINE with RMS norms and gated feed-forwards, on a narrow HGNetV2 or on a ViT.

Its own files know nothing of some parts of D-FINE, and transformers' port has them again; so the same weights give
other numbers there. The builders are as the published files are; transformers' ways are their keyword arguments:
tokens are projected before the selection (``project_tokens``), each layer's positions are made of the boxes refined so
far (``refine_positions``), and all heads but the positions' have ReLU (``activation``, ``position_activation``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from vitdet.backbones.hgnetv2 import hgnetv2_atto, hgnetv2_b0, hgnetv2_femto, hgnetv2_pico
from vitdet.backbones.spatial_adapter import SpatialAdapter
from vitdet.backbones.vit import ViT
from vitdet.core.feedforward import MLP
from vitdet.detectors.dfine import DistributionDecoder, make_layer
from vitdet.detectors.heads import choose_backbone
from vitdet.detectors.rtdetr import RTDETR


def make_positions(width: int, *, activation: str) -> MLP:
    """(…, 4) boxes to (…, C)."""
    return MLP(4, width, width, layers=3, activation=activation)


def deimv2(
    backbone: nn.Module, num_classes: int, *, gate: bool = True, share_box_head: bool = False, bins: int = 32,
    activation: str = "silu", position_activation: str = "silu", refine_positions: bool = False,
    project_tokens: bool = False, **numbers,
) -> RTDETR:  # fmt: skip
    """A DEIMv2 on any backbone.

    Args:
        gate: see :func:`make_layer`. share_box_head: one box head for all layers. bins: of an edge's distribution.
        activation: of the heads. position_activation: of the layers that make positions of boxes.
        refine_positions: see :class:`DistributionDecoder`. project_tokens: see :class:`QuerySelection`.
        numbers: of :class:`RTDETR`; ``decoder_hidden`` is the inner width of each half of the gated feed-forward.
    """
    defaults: dict[str, Any] = {
        "points": (3, 6, 3), "fusion": "plain_elan", "summed": True, "project_maps": False, "always_project": False,
    }  # fmt: skip
    decoder = partial(
        DistributionDecoder, bins=bins, activation=activation,
        make_layer=partial(make_layer, gate=gate, activation="swiglu", norm="rms", norm_eps=1e-6),
        make_positions=partial(make_positions, activation=position_activation), share_box_head=share_box_head,
        refine_positions=refine_positions,
    )  # fmt: skip
    return RTDETR(
        backbone, num_classes=num_classes, decoder=decoder, head_activation=activation, project_tokens=project_tokens,
        **(defaults | numbers),
    )  # fmt: skip


# What the three smallest share.
_LITE: dict[str, Any] = {
    "fusion": "lite", "encoder_expansion": 0.34, "encoder_blocks": 2, "decoder_layers": 3, "points": (4, 2),
    "gate": False, "share_box_head": True,
}  # fmt: skip


def deimv2_atto(num_classes: int, *, backbone: nn.Module | None = None, **overrides) -> RTDETR:
    """DEIMv2-Atto: 0.5 M parameters, 0.8 GFLOPs at 320×320, COCO AP 23.8 (arXiv 2509.20787, and its repository).

    ``backbone``: another one than the published, with one map of stride 16; for N with maps of stride 16 and 32, for
    the larger ones of 8, 16 and 32.
    """
    numbers: dict[str, Any] = {**_LITE, "encoder_width": 64, "width": 64, "decoder_hidden": 80, "num_queries": 100}
    return deimv2(backbone or hgnetv2_atto(), num_classes, **(numbers | overrides))


def deimv2_femto(num_classes: int, *, backbone: nn.Module | None = None, **overrides) -> RTDETR:
    """DEIMv2-Femto: 1.0 M parameters at 416×416, COCO AP 31.0 (the same)."""
    numbers: dict[str, Any] = {**_LITE, "encoder_width": 96, "width": 96, "decoder_hidden": 128, "num_queries": 150}
    return deimv2(backbone or hgnetv2_femto(), num_classes, **(numbers | overrides))


def deimv2_pico(num_classes: int, *, backbone: nn.Module | None = None, **overrides) -> RTDETR:
    """DEIMv2-Pico: 1.5 M parameters at 640×640, COCO AP 38.5 (the same)."""
    numbers: dict[str, Any] = {**_LITE, "encoder_width": 112, "width": 112, "decoder_hidden": 160, "num_queries": 200}
    return deimv2(backbone or hgnetv2_pico(), num_classes, **(numbers | overrides))


def deimv2_n(num_classes: int, *, backbone: nn.Module | None = None, **overrides) -> RTDETR:
    """DEIMv2-N: 3.6 M parameters, 6.8 GFLOPs, COCO AP 43.0 (the same)."""
    numbers: dict[str, Any] = {
        "fusion": "elan", "encoder_width": 128, "encoder_hidden": 512, "encoder_expansion": 0.34, "encoder_blocks": 2,
        "width": 128, "decoder_hidden": 256, "decoder_layers": 3, "points": (6, 6),
    }  # fmt: skip
    return deimv2(backbone or hgnetv2_b0(out_stages=(2, 3)), num_classes, **(numbers | overrides))


def distilled_vit(width: int, heads: int) -> ViT:
    """DEIMv2's ViT-T (192, 3) and ViT-T+ (256, 4), distilled from DINOv3: no registers, scales and final norm."""
    return ViT(
        width=width, layers=12, heads=heads, hidden=4 * width, positions="rotary", final_norm=False,
        out_layers=(3, 7, 11),
    )  # fmt: skip


def adapted_dinov3(*, gated: bool, key_bias: bool, width: int, inner: int) -> SpatialAdapter:
    """DINOv3's ViT-S/16, or ViT-S+/16 with a gated feed-forward (arXiv 2508.10104, table 2), with the adapter."""
    vit = ViT(
        width=384, layers=12, heads=6, hidden=1536, positions="rotary", registers=4, layer_scale=1e-5, norm_eps=1e-5,
        activation="swiglu" if gated else "gelu", key_bias=key_bias, out_layers=(5, 8, 11),
    )  # fmt: skip
    return SpatialAdapter(vit, width=width, inner=inner)


def deimv2_s(num_classes: int, *, backbone: nn.Module | None = None, **overrides) -> RTDETR:
    """DEIMv2-S: 9.7 M parameters, 25.6 GFLOPs, COCO AP 50.9 (the same)."""
    numbers: dict[str, Any] = {
        "encoder_width": 192, "encoder_hidden": 512, "encoder_expansion": 0.34, "encoder_blocks": 2, "width": 192,
        "decoder_hidden": 256, "decoder_layers": 4,
    }  # fmt: skip
    backbone = backbone or SpatialAdapter(distilled_vit(192, 3), width=192)
    return deimv2(backbone, num_classes, **(numbers | overrides))


def deimv2_m(num_classes: int, *, backbone: nn.Module | None = None, **overrides) -> RTDETR:
    """DEIMv2-M: 18.1 M parameters, 52.2 GFLOPs, COCO AP 53.0 (the same)."""
    numbers: dict[str, Any] = {
        "encoder_hidden": 512, "encoder_expansion": 0.67, "decoder_hidden": 256, "decoder_layers": 4,
    }  # fmt: skip
    backbone = backbone or SpatialAdapter(distilled_vit(256, 4), width=256)
    return deimv2(backbone, num_classes, **(numbers | overrides))


def deimv2_l(num_classes: int, *, backbone: nn.Module | None = None, key_bias: bool = False, **overrides) -> RTDETR:
    """DEIMv2-L: 32.2 M parameters, 96.7 GFLOPs, COCO AP 56.0 (the same).

    ``key_bias``: whether the ViT's keys have a bias: not in DINOv3, but in transformers' copies of this model.
    """
    numbers: dict[str, Any] = {
        "encoder_width": 224, "encoder_hidden": 896, "width": 224, "decoder_hidden": 896, "decoder_layers": 4,
    }  # fmt: skip
    backbone = choose_backbone(backbone, partial(adapted_dinov3, gated=False, width=224, inner=32), key_bias=key_bias)
    return deimv2(backbone, num_classes, **(numbers | overrides))


def deimv2_x(num_classes: int, *, backbone: nn.Module | None = None, key_bias: bool = False, **overrides) -> RTDETR:
    """DEIMv2-X: 50.3 M parameters, 151.6 GFLOPs, COCO AP 57.8 (the same); see :func:`deimv2_l`."""
    numbers: dict[str, Any] = {"encoder_expansion": 1.25, "encoder_blocks": 4}
    backbone = choose_backbone(backbone, partial(adapted_dinov3, gated=True, width=256, inner=64), key_bias=key_bias)
    return deimv2(backbone, num_classes, **(numbers | overrides))
