"""The classifiers' criterion: image labels, possibly mixed or smoothed, and a teacher's answers. In float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdet.structures import ImageTargets


class ClassificationCriterion(nn.Module):
    """What wrong classes cost, for heads with and without a distillation token.

    Args:
        label_smoothing: the share s of each target that is spread evenly: y (1 - s) + s / K (arXiv 1512.00567,
            section 7).
        kind: ``"softmax"``: cross-entropy with the targets as probabilities. ``"sigmoid"``: binary cross-entropy, the
            mean over classes and images as DeiT III has it (arXiv 2204.07118, section 3): a class that has any share
            of a mixed image is wholly present, for an image of two things shows both.
        distillation: weight of the hard distillation term (DeiT, arXiv 2012.12877, equation 3, where it is 0.5): the
            distillation token's head learns the teacher's class by cross-entropy, and the labels weigh the rest.

    Raises:
        ValueError: a number outside [0, 1] (smoothing: below 1), or an unknown kind.
    """

    def __init__(self, *, label_smoothing: float = 0.0, kind: str = "softmax", distillation: float = 0.0) -> None:
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing is a share in [0, 1), got {label_smoothing}")
        if kind not in ("softmax", "sigmoid"):
            raise ValueError(f"kind must be 'softmax' or 'sigmoid', got {kind!r}")
        if not 0 <= distillation <= 1:
            raise ValueError(f"distillation is a weight in [0, 1], got {distillation}")
        self.label_smoothing, self.kind, self.distillation = label_smoothing, kind, distillation

    def forward(self, logits: Tensor, targets: ImageTargets) -> dict[str, Tensor]:
        """The weighted terms and their sum, scalars: means over the batch.

        Args:
            logits: (B, K), or (B, 2, K) from a model with a distillation token: the class token's head, then the
                distillation token's.
            targets: of the same B and K. Without a teacher, or with ``distillation`` 0, two heads both learn the
                labels and the loss is their mean.

        Returns:
            ``"loss_class"``, with a teacher ``"loss_distill"``, and ``"total"``.

        Raises:
            ValueError: shapes that do not fit, or a teacher and a model without a distillation token.
        """
        size = tuple(targets.probabilities.shape)
        if logits.shape not in (size, (size[0], 2, size[1])):
            raise ValueError(f"logits are (B, K) or (B, 2, K) where the targets are {size}, got {tuple(logits.shape)}")
        teacher = targets.teacher if self.distillation > 0 else None
        if teacher is not None and logits.ndim == 2:
            raise ValueError("distillation needs a model with a distillation token, whose logits are (B, 2, K)")
        with torch.autocast(logits.device.type, enabled=False):
            logits = logits.float()
            if teacher is not None:
                labels = self.label_loss(logits[:, 0], targets.probabilities)
                losses = {
                    "loss_class": (1 - self.distillation) * labels,
                    "loss_distill": self.distillation * F.cross_entropy(logits[:, 1], teacher),
                }
            elif logits.ndim == 3:
                heads = [self.label_loss(head, targets.probabilities) for head in logits.unbind(1)]
                losses = {"loss_class": torch.stack(heads).mean()}
            else:
                losses = {"loss_class": self.label_loss(logits, targets.probabilities)}
            losses["total"] = torch.stack(list(losses.values())).sum()
        return losses

    def label_loss(self, logits: Tensor, probabilities: Tensor) -> Tensor:
        """The loss of one head's (B, K) float32 logits on (B, K) unsmoothed label probabilities, a scalar."""
        if self.kind == "sigmoid":
            probabilities = (probabilities > 0).to(logits.dtype)
        smoothed = probabilities * (1 - self.label_smoothing) + self.label_smoothing / probabilities.shape[1]
        if self.kind == "sigmoid":
            return F.binary_cross_entropy_with_logits(logits, smoothed)
        return F.cross_entropy(logits, smoothed)
