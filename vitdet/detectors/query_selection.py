"""Query selection: every memory token proposes a box, the best proposals become the decoder's object queries.

Source: two-stage Deformable DETR (arXiv 2010.04159, appendix A.4) as RT-DETR uses it (arXiv 2304.08069, section 4.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitdet.detectors.heads import make_box_head, make_score_head


@dataclass
class SelectedQueries:
    """The chosen tokens and what they propose.

    Attributes:
        tokens: (B, Q, C), cut from the graph. box_logits: (B, Q, 4) and logits: (B, Q, K), with gradient.
    """

    tokens: Tensor
    box_logits: Tensor
    logits: Tensor


def make_anchors(
    shapes: list[tuple[int, int]], *, base: float = 0.05, margin: float = 0.01, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """One square anchor per token, for maps of any size.

    Args:
        shapes: (h, w) of each level. base: side of the first level's anchors over the image's; it doubles per level.
        margin: anchors closer to the border than this are invalid: their logits would dwarf the learnt offsets.

    Returns:
        The anchors' logits (M, 4), 0 where invalid, and a mask of the valid ones (M, 1).
    """
    levels = []
    for level, (height, width) in enumerate(shapes):
        y, x = torch.meshgrid(
            (torch.arange(height, device=device) + 0.5) / height,
            (torch.arange(width, device=device) + 0.5) / width,
            indexing="ij",
        )
        side = torch.full_like(x, base * 2.0**level)
        levels.append(torch.stack([x, y, side, side], dim=-1).flatten(0, 1))
    anchors = torch.cat(levels)  # (M, 4)
    valid = ((anchors > margin) & (anchors < 1 - margin)).all(-1, keepdim=True)
    return torch.where(valid, torch.logit(anchors.clamp(1e-6, 1 - 1e-6)), 0.0), valid


class TokenProposals(nn.Module):
    """Lets every memory token propose a class and a box.

    One of them selects the queries. A second one may learn several proposals to a target, in training only: the
    selecting one must not, or it would score neighbours alike and fill the queries with duplicates.

    Args:
        width: C. num_classes: K.
        project: whether tokens are projected and normed first (not in DEIMv2). activation: of the box head.
    """

    def __init__(self, width: int, *, num_classes: int, project: bool = True, activation: str = "relu") -> None:
        super().__init__()
        self.project: nn.Module = nn.Identity()
        if project:
            linear = nn.Linear(width, width)
            nn.init.xavier_uniform_(linear.weight)
            self.project = nn.Sequential(linear, nn.LayerNorm(width))
        self.score_head = make_score_head(width, num_classes)
        self.box_head = make_box_head(width, activation=activation)

    def forward(self, memory: Tensor, shapes: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        """(B, M, C) tokens of maps of the given shapes to projected tokens, logits (B, M, K), box logits (B, M, 4)."""
        anchors, valid = make_anchors(shapes, device=memory.device)
        # `where`, not a product with the mask: a NaN survives multiplication by 0.
        tokens = self.project(torch.where(valid, memory, 0.0))  # (B, M, C)
        logits = self.score_head(tokens)  # (B, M, K)
        # An invalid anchor stands for "the whole image, lower right", as published: box (1, 1, 1, 1).
        box_logits = self.box_head(tokens).float() + torch.where(valid, anchors, 100.0)  # (B, M, 4)
        return tokens, logits, box_logits


class QuerySelection(nn.Module):
    """Scores all memory tokens and keeps the best.

    Args:
        width: C. num_classes: K. num_queries: Q, or all tokens where there are fewer.
        project, activation: see :class:`TokenProposals`.
    """

    def __init__(
        self, width: int, *, num_classes: int, num_queries: int, project: bool = True, activation: str = "relu"
    ) -> None:
        super().__init__()
        self.num_queries = num_queries
        self.proposals = TokenProposals(width, num_classes=num_classes, project=project, activation=activation)

    def forward(self, memory: Tensor, shapes: list[tuple[int, int]]) -> SelectedQueries:
        """(B, M, C) tokens of maps of the given shapes to the Q best."""
        tokens, logits, box_logits = self.proposals(memory, shapes)
        count = min(self.num_queries, memory.shape[1])
        index = logits.amax(-1).topk(count, dim=1).indices[..., None]  # (B, Q, 1)

        def pick(values: Tensor) -> Tensor:
            return values.gather(1, index.expand(-1, -1, values.shape[-1]))

        return SelectedQueries(pick(tokens).detach(), pick(box_logits), pick(logits))
