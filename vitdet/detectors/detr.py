"""DETR (arXiv 2005.12872): backbone, Transformer, learnt queries; boxes as a set, no anchors and no NMS.

It is the Transformer of 2017: post-norm encoder and decoder of :mod:`vitdet.core.stacks`, with positions added to
queries and keys in every layer. Images keep their proportions, so a batch of them is padded, and the padding is seen by
nobody. Differences from the published code: positions and masks are made for rows and columns apart, since padding is a
strip at the right and at the bottom; each auxiliary prediction is a named output of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from vitdet.backbones.resnet import resnet50, resnet101
from vitdet.core.attention import Attention
from vitdet.core.blocks import DecoderBlock, EncoderBlock
from vitdet.core.feedforward import MLP
from vitdet.core.masks import padding_mask, valid_cells
from vitdet.core.positions import sinusoidal_shares
from vitdet.core.stacks import DecoderStack, EncoderStack
from vitdet.detectors.heads import at_least, at_most_built, choose_backbone
from vitdet.structures import DetectorOutput, SupervisedOutput, Targets


class DETR(nn.Module):
    """The detector.

    Args:
        backbone: of its maps only the last, the coarsest, is used. Without ``any_size`` it takes images whose sides 32
            divides, and no padded batches.
        num_classes: K; the scores have K + 1 entries, of which the last says that there is no object.
        width, heads, hidden, dropout: of both stacks' blocks.
        encoder_layers, decoder_layers: blocks in each stack. num_queries: Q, the most objects that can be found.
    """

    def __init__(
        self, backbone: nn.Module, *, num_classes: int, width: int = 256, heads: int = 8, hidden: int = 2048,
        encoder_layers: int = 6, decoder_layers: int = 6, num_queries: int = 100, dropout: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__()
        at_least(
            1, num_classes=num_classes, width=width, heads=heads, hidden=hidden, decoder_layers=decoder_layers,
            num_queries=num_queries,
        )  # fmt: skip
        at_least(0, encoder_layers=encoder_layers)
        if width % 4 or not 0 <= dropout < 1:
            raise ValueError(f"width must be divisible by 4 and dropout in [0, 1), got {width} and {dropout}")
        at_most_built(encoder_layers=encoder_layers, decoder_layers=decoder_layers)
        # Of images, which any size will do for with convolutions; only then they can be padded to one another's sizes.
        self.stride = 1 if getattr(backbone, "any_size", False) else 32
        self.takes_sizes = self.stride == 1
        channels: Sequence[int] = backbone.channels  # type: ignore[assignment]
        self.num_classes = num_classes
        self.backbone = backbone
        self.project = nn.Conv2d(channels[-1], width, 1)
        self.encoder = EncoderStack(
            EncoderBlock(width, heads, hidden, activation="relu", dropout=dropout) for _ in range(encoder_layers)
        )
        self.decoder = DecoderStack(
            (
                DecoderBlock(
                    width, heads, hidden, dropout=dropout, cross_attention=Attention(width, heads, dropout=dropout)
                )
                for _ in range(decoder_layers)
            ),
            norm=nn.LayerNorm(width),
        )
        self.query_pos = nn.Parameter(torch.empty(num_queries, width))
        self.score_head = nn.Linear(width, num_classes + 1)
        self.box_head = MLP(width, width, 4, layers=3)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As published: Xavier-uniform matrices in both stacks (the three projections as one), normal queries."""
        for stack in (self.encoder, self.decoder):
            for parameter in stack.parameters():
                if parameter.ndim > 1:
                    nn.init.xavier_uniform_(parameter)
        nn.init.normal_(self.query_pos)

    def forward(self, images: Tensor, targets: Targets | None = None, sizes: Tensor | None = None) -> DetectorOutput:
        """Detect.

        Args:
            images: (B, 3, h, w), normalised, and 0 in the padding.
            targets: part of the signature that detectors share; DETR does not look at them.
            sizes: (B, 2) int64 heights and widths of the images within a padded batch; None where nothing is padded.

        Returns:
            :class:`DetectorOutput` with ``no_object``; boxes are shares of each image without its padding.
            ``supervised`` is filled in training, with every decoder layer's prediction.
        """
        del targets
        memory, memory_pos, mask = self.encode(images, sizes)
        query_pos = self.query_pos.to(memory.dtype)[None]  # (1, Q, C)
        layers = range(len(self.decoder.layers)) if self.training else [-1]
        taps = self.decoder.taps(
            memory.new_zeros(memory.shape[0], *self.query_pos.shape), memory, layers, query_pos=query_pos,
            context={"memory_pos": memory_pos, "mask": mask},
        )  # fmt: skip
        found = [(self.score_head(tap), self.box_head(tap).float().sigmoid()) for tap in taps]
        logits, boxes = found[-1]
        if not self.training:
            return DetectorOutput(logits, boxes, no_object=True)
        supervised = {f"decoder_{index}": SupervisedOutput(*one) for index, one in enumerate(found)}
        return DetectorOutput(logits, boxes, supervised, no_object=True)

    def encode(self, images: Tensor, sizes: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Images to memory tokens (B, M, C), their positions (B or 1, M, C), and their mask (B, 1, 1, M) if padded."""
        maps = self.project(self.backbone(images)[-1])  # (B, C, h/32, w/32)
        height, width = maps.shape[-2:]
        if sizes is None:
            rows, columns = (torch.ones(1, n, dtype=torch.bool, device=maps.device) for n in (height, width))
            mask = None
        else:
            sizes = sizes.to(maps.device)
            rows = valid_cells(sizes[:, 0], images.shape[-2], height)  # (B, h)
            columns = valid_cells(sizes[:, 1], images.shape[-1], width)  # (B, w)
            mask = padding_mask((rows[:, :, None] & columns[:, None]).flatten(1))  # (B, 1, 1, M)
        tokens = maps.flatten(2).transpose(1, 2)  # (B, M, C)
        pos = sinusoidal_shares(rows, columns, tokens.shape[-1]).to(tokens.dtype)
        return self.encoder(tokens, query_pos=pos, mask=mask), pos, mask


def detr_r50(
    num_classes: int, *, backbone: nn.Module | None = None, frozen_norm: bool | None = None, **overrides
) -> DETR:
    """DETR: 41 M parameters, 86 GFLOPs, COCO AP 42.0 (arXiv 2005.12872, table 1).

    ``backbone``: another one than the published. ``frozen_norm``: fixed batch norms in the published one, as they are
    where nothing is said; False for one that was not trained before.
    """
    frozen = backbone is None if frozen_norm is None else frozen_norm
    backbone = choose_backbone(backbone, partial(resnet50, out_stages=(3,)), frozen_norm=frozen)
    return DETR(backbone, num_classes=num_classes, **overrides)


def detr_r50_dc5(num_classes: int, *, frozen_norm: bool = True, **overrides) -> DETR:
    """DETR-DC5: 41 M parameters, 187 GFLOPs, COCO AP 43.3 (the same table), of maps twice as fine; see above."""
    backbone = resnet50(dilated=True, out_stages=(3,), frozen_norm=frozen_norm)
    return DETR(backbone, num_classes=num_classes, **overrides)


def detr_r101(num_classes: int, *, frozen_norm: bool = True, **overrides) -> DETR:
    """DETR-R101: 60 M parameters, 152 GFLOPs, COCO AP 43.5 (the same table); ``frozen_norm``: see :func:`detr_r50`."""
    return DETR(resnet101(out_stages=(3,), frozen_norm=frozen_norm), num_classes=num_classes, **overrides)


def detr_r101_dc5(num_classes: int, *, frozen_norm: bool = True, **overrides) -> DETR:
    """DETR-DC5-R101: 60 M parameters, 253 GFLOPs, COCO AP 44.9 (the same table); see :func:`detr_r50`."""
    backbone = resnet101(dilated=True, out_stages=(3,), frozen_norm=frozen_norm)
    return DETR(backbone, num_classes=num_classes, **overrides)
