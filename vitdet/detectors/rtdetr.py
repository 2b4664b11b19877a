"""RT-DETR (arXiv 2304.08069) and RT-DETRv2 (arXiv 2407.17140): backbone, hybrid encoder, query selection, deformable
decoder; no NMS. With another decoder and other fusion blocks it is D-FINE, see :mod:`vitdet.detectors.dfine`.

Differences from the published code: positions and anchors are made for the input at hand, so any height and width
divisible by 32 works; a batch without objects builds the same graph as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from vitdet.backbones.hgnetv2 import hgnetv2_b4, hgnetv2_b5
from vitdet.backbones.layers import dense_gradient, level_projections
from vitdet.backbones.pyramid import Pyramid
from vitdet.backbones.resnet import BasicBlock, ResNet, resnet18_vd, resnet34_vd, resnet50_vd, resnet101_vd
from vitdet.backbones.vit import ViT
from vitdet.core.blocks import DecoderBlock
from vitdet.core.deformable import DeformableAttention
from vitdet.core.feedforward import MLP
from vitdet.detectors.denoising import Denoising, DenoisingQueries
from vitdet.detectors.heads import (
    at_least,
    at_most_built,
    choose_backbone,
    inverse_sigmoid,
    make_box_head,
    make_score_head,
)
from vitdet.detectors.hybrid_encoder import make_encoder
from vitdet.detectors.query_selection import QuerySelection, SelectedQueries, TokenProposals
from vitdet.structures import DetectorOutput, SupervisedOutput, Targets


class RefiningDecoder(nn.Module):
    """Deformable decoder whose every layer refines the boxes of the one before (arXiv 2010.04159, appendix A.4).

    Args:
        width: C. heads, hidden, points, sampling, reach: of each layer. layers: L. levels: S. num_classes: K.
        eval_layers: how many of the layers are used in evaluation.
    """

    def __init__(
        self, *, width: int, heads: int, hidden: int, layers: int, levels: int, points: int | Sequence[int],
        num_classes: int, eval_layers: int, sampling: str = "bilinear", reach: float = 0.5,
    ) -> None:  # fmt: skip
        super().__init__()
        self.eval_layers = eval_layers
        self.layers = nn.ModuleList(
            DecoderBlock(
                width, heads, hidden, activation="relu",
                cross_attention=DeformableAttention(
                    width, heads, levels=levels, points=points, sampling=sampling, reach=reach
                ),
            )
            for _ in range(layers)
        )  # fmt: skip
        self.query_pos = MLP(4, 2 * width, width, layers=2)
        self.score_heads = nn.ModuleList(make_score_head(width, num_classes) for _ in range(layers))
        self.box_heads = nn.ModuleList(make_box_head(width) for _ in range(layers))

    def forward(
        self, tokens: Tensor, box_logits: Tensor, memory: Tensor, shapes: list[tuple[int, int]], mask: Tensor | None
    ) -> dict[str, SupervisedOutput]:
        """Decode.

        Args:
            tokens: (B, Q, C). box_logits: (B, Q, 4), where the queries start. memory: (B, M, C). shapes: of the levels.
            mask: (Q, Q), True = may attend.

        Returns:
            The layers' predictions ``"0"``, ``"1"``, … in order; in evaluation that of the last layer used only.
        """
        reference = box_logits.detach().float().sigmoid()
        outputs: dict[str, SupervisedOutput] = {}
        used = len(self.layers) if self.training else self.eval_layers
        for index, (layer, score_head, box_head) in enumerate(
            zip(self.layers[:used], self.score_heads[:used], self.box_heads[:used], strict=True)
        ):
            context = {"reference_boxes": reference, "shapes": shapes}
            pos = self.query_pos(reference)
            tokens = layer(tokens, memory, query_pos=pos, mask=mask, context=context)
            boxes = (box_head(tokens).float() + inverse_sigmoid(reference)).sigmoid()
            if self.training or index == used - 1:
                outputs[str(index)] = SupervisedOutput(score_head(tokens), boxes)
            reference = boxes.detach()  # layers learn on their own; the loss sees the boxes before the cut
        return outputs


class RTDETR(nn.Module):
    """The detector.

    Args:
        backbone: gives the maps, finest first, each half the size of the one before.
        num_classes: K.
        encoder_width, encoder_hidden, encoder_expansion, encoder_blocks, fusion, summed, project_maps: of the encoder,
            see :func:`make_encoder`.
        width, heads, decoder_hidden, decoder_layers, points, sampling, reach: of the decoder, such as
            :class:`RefiningDecoder`.
        eval_layers: decoder layers used in evaluation; all where not given.
        num_queries: Q. denoising_queries, label_noise, box_noise: of :class:`Denoising`; 0 queries for none.
        dense_supervision: in training, a second head on all encoder tokens learns several to a target
            ("one_to_many"): more positive examples a step. On BCCD it made no difference beyond noise.
        always_project: whether the decoder's memory is projected even where encoder and decoder are equally wide.
        project_tokens, head_activation: of :class:`QuerySelection`.
        decoder: makes the decoder from its numbers by name; its predictions come in order, the last one is the result.
    """

    stride = 32  # height and width of the images must be divisible by it

    def __init__(
        self, backbone: nn.Module, *, num_classes: int, encoder_width: int = 256, encoder_hidden: int = 1024,
        encoder_expansion: float = 1.0, encoder_blocks: int = 3, width: int = 256, heads: int = 8,
        decoder_hidden: int = 1024, decoder_layers: int = 6, points: int | Sequence[int] = 4, num_queries: int = 300,
        denoising_queries: int = 100, label_noise: float = 0.5, box_noise: float = 1.0, dense_supervision: bool = False,
        eval_layers: int | None = None, sampling: str = "bilinear", reach: float = 0.5, fusion: str = "csp",
        summed: bool = False, project_maps: bool = True, always_project: bool = True, project_tokens: bool = True,
        head_activation: str = "relu", decoder: Callable[..., nn.Module] = RefiningDecoder,
    ) -> None:  # fmt: skip
        super().__init__()
        eval_layers = decoder_layers if eval_layers is None else eval_layers
        at_least(
            1, num_classes=num_classes, encoder_width=encoder_width, encoder_hidden=encoder_hidden,
            encoder_blocks=encoder_blocks, width=width, heads=heads, decoder_hidden=decoder_hidden,
            decoder_layers=decoder_layers, eval_layers=eval_layers, num_queries=num_queries,
        )  # fmt: skip
        for number in [points] if isinstance(points, int) else points:
            at_least(1, points=number)
        at_least(
            0, denoising_queries=denoising_queries, label_noise=label_noise, box_noise=box_noise, reach=reach,
            encoder_expansion=encoder_expansion,
        )  # fmt: skip
        at_most_built(decoder_layers=decoder_layers, encoder_blocks=encoder_blocks)
        if encoder_expansion <= 0 or label_noise > 1 or eval_layers > decoder_layers:
            raise ValueError(
                "encoder_expansion must be above 0, label_noise at most 1, eval_layers at most decoder_layers; "
                f"got {encoder_expansion}, {label_noise}, {eval_layers} of {decoder_layers}"
            )
        channels: Sequence[int] = backbone.channels  # type: ignore[assignment]
        self.num_classes = num_classes
        self.backbone = backbone
        self.encoder = make_encoder(
            channels, fusion=fusion, width=encoder_width, heads=heads, hidden=encoder_hidden,
            expansion=encoder_expansion, blocks=encoder_blocks, summed=summed, project_maps=project_maps,
        )  # fmt: skip
        self.memory_project = level_projections(self.encoder.channels, width, always=always_project)
        self.query_selection = QuerySelection(
            width, num_classes=num_classes, num_queries=num_queries, project=project_tokens,
            activation=head_activation,
        )  # fmt: skip
        self.dense_head = TokenProposals(width, num_classes=num_classes) if dense_supervision else None
        self.denoising = (
            Denoising(
                width, num_classes=num_classes, queries=denoising_queries, label_noise=label_noise, box_noise=box_noise
            )
            if denoising_queries
            else None
        )
        self.decoder = decoder(
            width=width, heads=heads, hidden=decoder_hidden, layers=decoder_layers, levels=len(self.encoder.channels),
            points=points, num_classes=num_classes, eval_layers=eval_layers, sampling=sampling, reach=reach,
        )  # fmt: skip

    def forward(self, images: Tensor, targets: Targets | None = None) -> DetectorOutput:
        """Detect.

        Args:
            images: (B, 3, h, w), normalised; h and w divisible by 32.
            targets: in training, for the denoising queries.

        Returns:
            :class:`DetectorOutput`; ``supervised`` is filled in training.
        """
        if images.shape[-2] % self.stride or images.shape[-1] % self.stride:
            raise ValueError(
                f"height and width must be divisible by {self.stride}, got {tuple(images.shape[-2:])}; "
                "resize or pad the images"
            )
        memory, shapes = self.encode(images)
        selected = self.query_selection(memory, shapes)
        tokens, box_logits, mask, denoising = selected.tokens, selected.box_logits, None, None
        if self.training and self.denoising is not None and targets is not None:
            denoising = self.denoising(targets)
            mask = denoising.attention_mask(tokens.shape[1])
            tokens = torch.cat([denoising.tokens.to(tokens.dtype), tokens], dim=1)
            box_logits = torch.cat([denoising.box_logits, box_logits], dim=1)
        predictions: dict[str, SupervisedOutput] = self.decoder(tokens, box_logits, memory, shapes, mask)
        if not self.training:
            (final,) = predictions.values()
            return DetectorOutput(final.logits, final.boxes)
        output = self.supervise(predictions, selected, denoising)
        if self.dense_head is not None:
            _, logits, box_logits = self.dense_head(memory, shapes)
            output.supervised["dense"] = SupervisedOutput(logits, box_logits.sigmoid(), "one_to_many")
        return output

    def encode(self, images: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
        """(B, 3, h, w) images to memory tokens (B, M, C) and the shapes of their S maps."""
        maps = self.encoder(self.backbone(images))
        maps = [dense_gradient(project(one)) for project, one in zip(self.memory_project, maps, strict=True)]
        shapes = [(one.shape[-2], one.shape[-1]) for one in maps]
        return torch.cat([one.flatten(2) for one in maps], dim=-1).transpose(1, 2), shapes

    def supervise(
        self, predictions: dict[str, SupervisedOutput], selected: SelectedQueries, denoising: DenoisingQueries | None
    ) -> DetectorOutput:
        """Name every prediction the criterion is to see."""
        supervised: dict[str, SupervisedOutput] = {}
        known = 0 if denoising is None else denoising.target_index.shape[1]
        for name, prediction in predictions.items():
            supervised[f"decoder_{name}"] = final = prediction.of(slice(known, None))
            if denoising is not None:
                supervised[f"denoising_{name}"] = replace(
                    prediction.of(slice(known)), matching="given", target_index=denoising.target_index,
                    groups=denoising.groups,
                )  # fmt: skip
        supervised["encoder"] = SupervisedOutput(selected.logits, selected.box_logits.sigmoid())
        return DetectorOutput(final.logits, final.boxes, supervised)


def rtdetr_r18(num_classes: int, *, backbone: nn.Module | None = None, **overrides) -> RTDETR:
    """RT-DETR-R18: 20 M parameters, 60 GFLOPs, COCO AP 46.4 (arXiv 2304.08069, table 2 and its repository).

    ``backbone``: another one than the published, with maps of stride 8, 16 and 32; so in all that follow.
    """
    numbers = {"encoder_expansion": 0.5, "decoder_layers": 3}
    return RTDETR(backbone or resnet18_vd(), num_classes=num_classes, **(numbers | overrides))


def rtdetr_r34(num_classes: int, *, backbone: nn.Module | None = None, **overrides) -> RTDETR:
    """RT-DETR-R34: 31 M parameters, 92 GFLOPs, COCO AP 48.9 (the same)."""
    numbers = {"encoder_expansion": 0.5, "decoder_layers": 4}
    return RTDETR(backbone or resnet34_vd(), num_classes=num_classes, **(numbers | overrides))


def rtdetr_r50_m(
    num_classes: int, *, backbone: nn.Module | None = None, frozen_norm: bool = False, **overrides
) -> RTDETR:
    """RT-DETR-R50-m: 36 M parameters, 100 GFLOPs, COCO AP 51.3 (the same); trains six layers, evaluates three.

    ``frozen_norm``: fixed batch norms in the published backbone, as published; only with one that was trained before.
    """
    numbers = {"encoder_expansion": 0.5, "eval_layers": 3}
    backbone = choose_backbone(backbone, resnet50_vd, frozen_norm=frozen_norm)
    return RTDETR(backbone, num_classes=num_classes, **(numbers | overrides))


def rtdetr_r50(
    num_classes: int, *, backbone: nn.Module | None = None, frozen_norm: bool = False, **overrides
) -> RTDETR:
    """RT-DETR-R50: 42 M parameters, 136 GFLOPs, COCO AP 53.1 (arXiv 2304.08069, table 2); see :func:`rtdetr_r50_m`."""
    backbone = choose_backbone(backbone, resnet50_vd, frozen_norm=frozen_norm)
    return RTDETR(backbone, num_classes=num_classes, **overrides)


def rtdetr_r101(
    num_classes: int, *, backbone: nn.Module | None = None, frozen_norm: bool = False, **overrides
) -> RTDETR:
    """RT-DETR-R101: 76 M parameters, 259 GFLOPs, COCO AP 54.3 (the same table); see :func:`rtdetr_r50_m`."""
    numbers = {"encoder_width": 384, "encoder_hidden": 2048}
    backbone = choose_backbone(backbone, resnet101_vd, frozen_norm=frozen_norm)
    return RTDETR(backbone, num_classes=num_classes, **(numbers | overrides))


def rtdetr_hgnetv2_l(
    num_classes: int, *, backbone: nn.Module | None = None, frozen_norm: bool = False, **overrides
) -> RTDETR:
    """RT-DETR-L: 32 M parameters, 110 GFLOPs, COCO AP 53.0 (the same table); see :func:`rtdetr_r50_m`."""
    backbone = choose_backbone(backbone, hgnetv2_b4, frozen_norm=frozen_norm)
    return RTDETR(backbone, num_classes=num_classes, **overrides)


def rtdetr_hgnetv2_x(
    num_classes: int, *, backbone: nn.Module | None = None, frozen_norm: bool = False, **overrides
) -> RTDETR:
    """RT-DETR-X: 67 M parameters, 234 GFLOPs, COCO AP 54.8 (the same table); see :func:`rtdetr_r50_m`."""
    numbers = {"encoder_width": 384, "encoder_hidden": 2048}
    backbone = choose_backbone(backbone, hgnetv2_b5, frozen_norm=frozen_norm)
    return RTDETR(backbone, num_classes=num_classes, **(numbers | overrides))


def rtdetr_vit_s(num_classes: int, *, drop_path: float = 0.0, **overrides) -> RTDETR:
    """RT-DETR on a plain ViT-S/16 with a pyramid, ours: 34 M parameters; no AP is published.

    The numbers are those of R34, whose backbone is as large. The ViT's learnt positions are for images of 224×224, as
    published ViTs have them, and resampled for every other size. ``drop_path``: its stochastic depth, see :class:`ViT`.
    """
    vit = ViT(width=384, layers=12, heads=6, hidden=1536, drop_path=drop_path)
    return rtdetr_r34(num_classes, backbone=Pyramid(vit), **overrides)


def rtdetrv2_r18(num_classes: int, *, backbone: nn.Module | None = None, **overrides) -> RTDETR:
    """RT-DETRv2-S: COCO AP 48.1 (arXiv 2407.17140, table 1, and its repository); the numbers of :func:`rtdetr_r18`.

    Version 2 is trained differently, and may have another number of ``points`` in each level, or read single cells
    (``sampling="discrete"``: AP 47.4, tuned from the other's weights).
    """
    return rtdetr_r18(num_classes, backbone=backbone, **overrides)


def rtdetrv2_r34(num_classes: int, *, backbone: nn.Module | None = None, **overrides) -> RTDETR:
    """RT-DETRv2-M*: COCO AP 49.9, 49.2 with discrete sampling (the same); see :func:`rtdetrv2_r18`."""
    return rtdetr_r34(num_classes, backbone=backbone, **overrides)


def rtdetrv2_r50_m(
    num_classes: int, *, backbone: nn.Module | None = None, frozen_norm: bool = False, **overrides
) -> RTDETR:
    """RT-DETRv2-M: COCO AP 51.9, 51.4 with discrete sampling (the same); see :func:`rtdetrv2_r18`."""
    return rtdetr_r50_m(num_classes, backbone=backbone, frozen_norm=frozen_norm, **overrides)


def rtdetrv2_r50(
    num_classes: int, *, backbone: nn.Module | None = None, frozen_norm: bool = False, **overrides
) -> RTDETR:
    """RT-DETRv2-L: COCO AP 53.4, 52.9 with discrete sampling (the same); see :func:`rtdetrv2_r18`."""
    return rtdetr_r50(num_classes, backbone=backbone, frozen_norm=frozen_norm, **overrides)


def rtdetrv2_r101(
    num_classes: int, *, backbone: nn.Module | None = None, frozen_norm: bool = False, **overrides
) -> RTDETR:
    """RT-DETRv2-X: COCO AP 54.3 (the same); see :func:`rtdetrv2_r18`."""
    return rtdetr_r101(num_classes, backbone=backbone, frozen_norm=frozen_norm, **overrides)


def rtdetrv2_hgnetv2_l(
    num_classes: int, *, backbone: nn.Module | None = None, frozen_norm: bool = False, **overrides
) -> RTDETR:
    """RT-DETRv2 on HGNetv2-L: COCO AP 52.9 (its repository); see :func:`rtdetrv2_r18`."""
    return rtdetr_hgnetv2_l(num_classes, backbone=backbone, frozen_norm=frozen_norm, **overrides)


def rtdetrv2_hgnetv2_x(
    num_classes: int, *, backbone: nn.Module | None = None, frozen_norm: bool = False, **overrides
) -> RTDETR:
    """RT-DETRv2 on HGNetv2-X: COCO AP 54.7 (its repository); see :func:`rtdetrv2_r18`."""
    return rtdetr_hgnetv2_x(num_classes, backbone=backbone, frozen_norm=frozen_norm, **overrides)


def rtdetr_nano(num_classes: int, *, backbone: nn.Module | None = None, **overrides) -> RTDETR:
    """A small RT-DETR for small images on CPUs, ours: 3.3 M parameters, BCCD val AP50 0.866 in 15 minutes on 2 cores.

    Against the published ones: few maps at half the image's size, one fusion block instead of three, four heads (whose
    wider rows suit a matrix unit), and dense supervision in training.
    """
    small = partial(ResNet, depths=(1, 1, 2, 1), block=BasicBlock, stem=(16, 32), widths=(32, 64, 128, 256))
    numbers = {
        "encoder_width": 128, "encoder_hidden": 256, "encoder_expansion": 0.5, "encoder_blocks": 1, "width": 128,
        "heads": 4, "decoder_hidden": 256, "decoder_layers": 3, "num_queries": 100, "denoising_queries": 50,
        "dense_supervision": True,
    }  # fmt: skip
    return RTDETR(backbone or small(), num_classes=num_classes, **(numbers | overrides))
