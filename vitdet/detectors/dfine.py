"""D-FINE (arXiv 2410.13842): RT-DETR whose decoder refines distributions of the box's edges, layer by layer.

The first layer predicts a box as RT-DETR does. From there on every layer adds to the logits of four distributions, one
an edge, over bins of distances; an edge lies at the expected distance. The bins lie dense around 0 and wide apart
far from it. How sharp the distributions are tells how sure the box is, and corrects the class scores.

Differences from the published code: positions and anchors are made for the input at hand; a batch without objects
builds the same graph as any other; layers that are only trained are as wide as the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdet.backbones.hgnetv2 import hgnetv2_b0, hgnetv2_b2, hgnetv2_b4, hgnetv2_b5
from vitdet.boxes import xyxy_to_cxcywh
from vitdet.core.blocks import DecoderBlock, GatedResidual
from vitdet.core.deformable import DeformableAttention
from vitdet.core.feedforward import MLP
from vitdet.detectors.heads import choose_backbone, inverse_sigmoid, make_box_head, make_score_head
from vitdet.detectors.rtdetr import RTDETR
from vitdet.structures import EdgeDistributions, SupervisedOutput


def make_bins(up: Tensor, scale: Tensor, *, count: int) -> Tensor:
    """W(n), the distances that an edge's distribution is over (equation 2 and appendix A.1).

    Args:
        up: (1,), the largest inner distance over ``scale``. scale: (1,), how flat the middle is.
        count: N, even: there are N + 1 bins.

    Returns:
        (N + 1,) rising: −2·up·scale, N/2 − 1 steps that shrink towards 0, 0, and the same with the other sign.
    """
    edge = up.float().abs() * scale.float().abs()  # (1,)
    exponents = torch.arange(1, count // 2, device=up.device) * (2 / (count - 2))
    inner = (edge + 1) ** exponents - 1  # (N/2 - 1,), up to `edge`
    return torch.cat([-2 * edge, -inner.flip(0), torch.zeros_like(edge), inner, 2 * edge])


def expected_distances(logits: Tensor, bins: Tensor) -> Tensor:
    """(B, Q, 4, N + 1) logits over (N + 1,) bins to the (B, Q, 4) expected distances (equation 1)."""
    with torch.autocast(logits.device.type, enabled=False):  # bfloat16 would be too coarse for coordinates
        return F.linear(logits.softmax(-1), bins[None])[..., 0]


def move_edges(boxes: Tensor, distances: Tensor, scale: Tensor) -> Tensor:
    """Boxes whose left, top, right and bottom edge lie off the given ones' (equation 1).

    Args:
        boxes: (B, Q, 4) ``cxcywh``. distances: (B, Q, 4), outwards; in the box's size over ``scale``. scale: (1,).

    Returns:
        (B, Q, 4) ``cxcywh``, which may reach beyond the image.
    """
    scale = scale.float().abs()
    centre, size = boxes.split(2, dim=-1)  # (B, Q, 2)
    low, high = ((0.5 * scale + one) * (size / scale) for one in distances.split(2, dim=-1))
    return xyxy_to_cxcywh(torch.cat([centre - low, centre + high], dim=-1))


class LocationQuality(nn.Module):
    """Corrects class scores by how sharp the box's distributions are (section 4.1; LQE in the code; arXiv 2011.12885).

    It starts by correcting nothing.

    Args:
        top: the largest probabilities of each edge that it looks at, and their mean.
        hidden, layers, activation: of its perceptron.
    """

    def __init__(self, *, top: int = 4, hidden: int = 64, layers: int = 2, activation: str = "relu") -> None:
        super().__init__()
        self.top = top
        self.head = MLP(4 * (top + 1), hidden, 1, layers=layers, activation=activation)
        for parameter in self.head.layers[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, logits: Tensor, edges: Tensor) -> Tensor:
        """(B, Q, K) class logits and (B, Q, 4, N + 1) edge logits to (B, Q, K)."""
        largest = edges.softmax(-1).topk(self.top, dim=-1).values  # (B, Q, 4, top)
        statistics = torch.cat([largest, largest.mean(-1, keepdim=True)], dim=-1)
        return logits + self.head(statistics.flatten(2))


def make_layer(
    width: int, heads: int, hidden: int, *, levels: int, points: int | Sequence[int], sampling: str, reach: float,
    gate: bool = True, activation: str = "relu", norm: str = "layer", norm_eps: float = 1e-5,
) -> DecoderBlock:  # fmt: skip
    """A layer of the decoder: gates, or plain addition, join what is read from the memory, which is read as it is."""
    cross = DeformableAttention(
        width, heads, levels=levels, points=points, sampling=sampling, reach=reach, project=False
    )  # fmt: skip
    return DecoderBlock(
        width, heads, hidden, activation=activation, norm=norm, norm_eps=norm_eps, cross_attention=cross,
        cross_residual=GatedResidual(width, norm=norm, norm_eps=norm_eps) if gate else None,
    )  # fmt: skip


def make_positions(width: int, *, activation: str = "relu") -> MLP:
    """(…, 4) boxes to (…, C)."""
    return MLP(4, 2 * width, width, layers=2, activation=activation)


class DistributionDecoder(nn.Module):
    """Deformable decoder that refines distributions of a first box's edges (section 4.1: FDR).

    Args:
        width: C. heads, hidden, points, sampling, reach: of each layer. layers: L. levels: S. num_classes: K.
        eval_layers: how many of the layers are used in evaluation.
        bins: N, even, at least 4. reg_scale, up: see :func:`make_bins`; kept in the state, as in published files.
        activation: of the heads. share_box_head: one for all layers.
        refine_positions: whether each layer's positions are made of the boxes refined so far, not all of the selected.
        make_layer, make_positions: make a layer, and what gives queries the positions of their boxes, from C.
    """

    def __init__(
        self, *, width: int, heads: int, hidden: int, layers: int, levels: int, points: int | Sequence[int],
        num_classes: int, eval_layers: int, sampling: str = "bilinear", reach: float = 0.5, bins: int = 32,
        reg_scale: float = 4.0, up: float = 0.5, activation: str = "relu", share_box_head: bool = False,
        refine_positions: bool = True, make_layer: Callable[..., nn.Module] = make_layer,
        make_positions: Callable[[int], nn.Module] = make_positions,
    ) -> None:  # fmt: skip
        super().__init__()
        if bins < 4 or bins % 2 or reg_scale <= 0 or up <= 0:
            raise ValueError(
                f"bins must be even and at least 4, reg_scale and up above 0; got {bins}, {reg_scale}, {up}"
            )
        self.eval_layers, self.bins, self.refine_positions = eval_layers, bins, refine_positions
        self.up: Tensor
        self.reg_scale: Tensor
        self.register_buffer("up", torch.tensor([float(up)]))
        self.register_buffer("reg_scale", torch.tensor([float(reg_scale)]))
        options = {"levels": levels, "points": points, "sampling": sampling, "reach": reach}
        self.layers = nn.ModuleList(make_layer(width, heads, hidden, **options) for _ in range(layers))
        self.query_pos = make_positions(width)
        self.score_heads = nn.ModuleList(make_score_head(width, num_classes) for _ in range(layers))
        self.first_box_head = make_box_head(width, activation=activation)
        self.box_heads = nn.ModuleList(
            make_box_head(width, outputs=4 * (bins + 1), activation=activation)
            for _ in range(1 if share_box_head else layers)
        )
        self.quality_heads = nn.ModuleList(LocationQuality(activation=activation) for _ in range(layers))

    def forward(
        self, tokens: Tensor, box_logits: Tensor, memory: Tensor, shapes: list[tuple[int, int]], mask: Tensor | None
    ) -> dict[str, SupervisedOutput]:
        """Decode; arguments as for :class:`RefiningDecoder`.

        Returns:
            The layers' predictions ``"0"``, ``"1"``, …, before them ``"pre"``, the first box; the last layer teaches
            the others. In evaluation that of the last layer used only.
        """
        bins = make_bins(self.up, self.reg_scale, count=self.bins)
        reference = box_logits.detach().float().sigmoid()
        edges = before = first = pos = None
        outputs: dict[str, SupervisedOutput] = {}
        used = len(self.layers) if self.training else self.eval_layers
        for index, layer in enumerate(self.layers[:used]):
            context = {"reference_boxes": reference, "shapes": shapes}
            if pos is None or self.refine_positions:
                pos = self.query_pos(reference).clamp(-10, 10)
            tokens = layer(tokens, memory, query_pos=pos, mask=mask, context=context)
            if first is None:
                boxes = (self.first_box_head(tokens).float() + inverse_sigmoid(reference)).sigmoid()
                first = boxes.detach()  # (B, Q, 4), from which all layers tell the edges
                if self.training:
                    outputs["pre"] = SupervisedOutput(self.score_heads[0](tokens), boxes)
            box_head = self.box_heads[min(index, len(self.box_heads) - 1)]  # each layer's own, or one for all
            change = box_head(tokens if before is None else tokens + before)
            change = change.float().unflatten(-1, (4, -1))  # (B, Q, 4, N + 1)
            edges = change if edges is None else edges + change
            boxes = move_edges(first, expected_distances(edges, bins), self.reg_scale)
            if self.training or index == used - 1:
                logits = self.quality_heads[index](self.score_heads[index](tokens), edges)
                distributions = EdgeDistributions(edges, first, bins, self.reg_scale)
                outputs[str(index)] = SupervisedOutput(logits, boxes, edges=distributions)
            reference, before = boxes.detach(), tokens.detach()
        teach(outputs)
        return outputs


def teach(outputs: dict[str, SupervisedOutput]) -> None:
    """Give the last prediction's distributions, and how confident it is, to the earlier ones as their teacher."""
    *earlier, last = ((one.logits, one.edges) for one in outputs.values() if one.edges is not None)
    for _, edges in earlier:
        edges.teacher = last[1].logits.detach()
        edges.confidence = last[0].detach().float().sigmoid().amax(-1)  # (B, Q)


def dfine(
    backbone: nn.Module, num_classes: int, *, bins: int = 32, reg_scale: float = 4.0, up: float = 0.5,
    activation: str = "relu", **numbers,
) -> RTDETR:  # fmt: skip
    """A D-FINE on any backbone.

    Args:
        bins, reg_scale, up: of :class:`DistributionDecoder`.
        activation: of the decoder's layers and of all heads; DEIM's files of D-FINE have ``"silu"``.
        numbers: of :class:`RTDETR`.
    """
    defaults: dict[str, Any] = {
        "points": (3, 6, 3), "fusion": "elan", "always_project": False, "head_activation": activation,
    }  # fmt: skip
    decoder = partial(
        DistributionDecoder, bins=bins, reg_scale=reg_scale, up=up, activation=activation,
        make_layer=partial(make_layer, activation=activation),
        make_positions=partial(make_positions, activation=activation),
    )  # fmt: skip
    return RTDETR(backbone, num_classes=num_classes, decoder=decoder, **(defaults | numbers))


def dfine_n(num_classes: int, *, backbone: nn.Module | None = None, **overrides) -> RTDETR:
    """D-FINE-N: 4 M parameters, 7 GFLOPs, COCO AP 42.8 (the repository's table); two levels, strides 16 and 32.

    ``backbone``: another one than the published, with maps of these strides; in all others of 8, 16 and 32.
    """
    numbers: dict[str, Any] = {
        "encoder_width": 128, "encoder_hidden": 512, "encoder_expansion": 0.34, "encoder_blocks": 2, "width": 128,
        "decoder_hidden": 512, "decoder_layers": 3, "points": (6, 6),
    }  # fmt: skip
    return dfine(backbone or hgnetv2_b0(out_stages=(2, 3)), num_classes, **(numbers | overrides))


def dfine_s(num_classes: int, *, backbone: nn.Module | None = None, **overrides) -> RTDETR:
    """D-FINE-S: 10 M parameters, 25 GFLOPs, COCO AP 48.5, 50.7 with Objects365 (arXiv 2410.13842, table 1)."""
    numbers: dict[str, Any] = {"encoder_expansion": 0.5, "encoder_blocks": 1, "decoder_layers": 3}
    return dfine(backbone or hgnetv2_b0(), num_classes, **(numbers | overrides))


def dfine_m(num_classes: int, *, backbone: nn.Module | None = None, **overrides) -> RTDETR:
    """D-FINE-M: 19 M parameters, 57 GFLOPs, COCO AP 52.3, 55.1 with Objects365 (the same)."""
    numbers: dict[str, Any] = {"encoder_blocks": 2, "decoder_layers": 4}
    return dfine(backbone or hgnetv2_b2(), num_classes, **(numbers | overrides))


def dfine_l(num_classes: int, *, backbone: nn.Module | None = None, frozen_norm: bool = False, **overrides) -> RTDETR:
    """D-FINE-L: 31 M parameters, 91 GFLOPs, COCO AP 54.0, 57.3 with Objects365 (the same).

    ``frozen_norm``: fixed batch norms in the published backbone, as published; only with one that was trained before.
    """
    return dfine(choose_backbone(backbone, hgnetv2_b4, frozen_norm=frozen_norm), num_classes, **overrides)


def dfine_x(num_classes: int, *, backbone: nn.Module | None = None, frozen_norm: bool = False, **overrides) -> RTDETR:
    """D-FINE-X: 62 M parameters, 202 GFLOPs, COCO AP 55.8, 59.3 with Objects365 (the same); see :func:`dfine_l`."""
    numbers: dict[str, Any] = {"encoder_width": 384, "encoder_hidden": 2048, "reg_scale": 8.0}
    backbone = choose_backbone(backbone, hgnetv2_b5, frozen_norm=frozen_norm)
    return dfine(backbone, num_classes, **(numbers | overrides))
