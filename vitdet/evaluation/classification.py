"""How often a classifier is right: top-1, top-5, per class, and what it takes for what."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitdet.errors import UserError
from vitdet.structures import ClassMap

NAMED = 60  # classes up to which a confusion matrix names them
COUNTED = 20  # classes up to which its cells show their counts


class ClassificationEvaluator:
    """Accuracies of one pass over a data set.

    Several processes each measure their own images; :meth:`state_rows` of all, gathered, go into the one that computes.

    Args:
        class_map: the K classes; label i is its i-th.
    """

    def __init__(self, class_map: ClassMap) -> None:
        self._class_map = class_map
        self._best = min(5, len(class_map))
        self._rows: list[np.ndarray] = []

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Args:
            logits: (B, K), on any device. Classes with equal logits rank by label, the lowest first.
            labels: (B,) integers, the truth.

        Raises:
            UserError: another number of classes, a label that is none of them, or logits that are not finite.
        """
        classes = len(self._class_map)
        if logits.ndim != 2 or logits.shape[1] != classes:
            raise UserError(
                f"the model gives {tuple(logits.shape)} logits, but the data has {classes} classes; "
                "evaluate on data with the classes it was trained on"
            )
        logits, labels = logits.detach().float().cpu(), labels.cpu()
        if not logits.isfinite().all():
            raise UserError(
                "the model gives logits that are not finite; look for a half-precision overflow or diverged weights"
            )
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise UserError(f"a label is not in 0…{classes - 1}, as the {classes} classes have it; repair the data set")
        best = logits.sort(dim=1, descending=True, stable=True).indices[:, : self._best]  # (B, k)
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")  # (B,)
        columns = torch.cat([labels.double()[:, None], loss.double()[:, None], best.double()], dim=1)  # (B, 2 + k)
        self._rows.append(columns.numpy())

    def state_rows(self) -> list[np.ndarray]:
        """What was measured, to be given to another evaluator's :meth:`add_rows`.

        A list of (B, 2 + min(5, K)) arrays, a row an image: label, cross-entropy, best labels in order.
        """
        return list(self._rows)

    def add_rows(self, rows: Sequence[np.ndarray]) -> None:
        """Add what other evaluators of the same classes have measured on other images."""
        self._rows += rows

    def compute(self) -> dict[str, Any]:
        """The metrics, plain values without NaN.

        Returns:
            ``top1``, ``top5`` (the best min(5, K) count) in [0, 1]; ``loss``: mean cross-entropy; ``images``;
            ``per_class``: name -> ``{"top1": …, "images": …}`` in the order of the labels, ``top1`` None where the
            class has no image; ``confusion``: K rows of K counts, row = truth, column = best class.

        Raises:
            UserError: no image was measured.
        """
        rows = np.concatenate([np.empty((0, 2 + self._best)), *self._rows])
        if not len(rows):
            raise UserError("no image was measured; give a data set with at least one image")
        classes = len(self._class_map)
        labels, best = rows[:, 0].astype(int), rows[:, 2:].astype(int)
        hits = best == labels[:, None]  # (images, k)
        confusion = np.bincount(labels * classes + best[:, 0], minlength=classes**2).reshape(classes, classes)
        images, right = confusion.sum(axis=1), confusion.diagonal()
        per_class = {
            name: {"top1": float(right[label] / images[label]) if images[label] else None, "images": int(images[label])}
            for label, name in enumerate(self._class_map.distinct_names)
        }
        return {
            "top1": float(hits[:, 0].mean()),
            "top5": float(hits.any(axis=1).mean()),
            "loss": math.fsum(rows[:, 1]) / len(rows),  # exact, so that the order of the images does not matter
            "images": len(rows),
            "per_class": per_class,
            "confusion": confusion.tolist(),
        }


def format_table(metrics: Mapping[str, Any]) -> str:
    """The metrics of the whole data set, a line each."""
    rows = [
        ("top-1 accuracy", f"{metrics['top1']:.4f}"),
        ("top-5 accuracy", f"{metrics['top5']:.4f}"),
        ("cross-entropy", f"{metrics['loss']:.4f}"),
        ("images", str(metrics["images"])),
    ]
    return "\n".join(f" {name:<15} {value:>8}" for name, value in rows)


def format_class_table(metrics: Mapping[str, Any]) -> str:
    """One line a class with its top-1 accuracy (that is, its recall) and images, ``-`` where it has no image."""
    width = max(len(name) for name in ("class", *metrics["per_class"]))
    lines = [f" {'class':<{width}}   top-1  images"]
    for name, values in metrics["per_class"].items():
        top1 = "-" if values["top1"] is None else f"{values['top1']:.4f}"
        lines.append(f" {name:<{width}} {top1:>7} {values['images']:>7}")
    return "\n".join(lines)


def save_confusion(metrics: Mapping[str, Any], path: str | Path) -> None:
    """Draw the confusion matrix as PNG.

    Each row (a true class) is coloured by where its images went, as shares of the row. Up to ``COUNTED`` classes the
    counts stand in the cells, up to ``NAMED`` the names at the sides; beyond that there is only the pattern.

    Args:
        metrics: of :meth:`ClassificationEvaluator.compute`.
        path: of the picture.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure  # not pyplot: no window system, no global state

    counts = np.asarray(metrics["confusion"])  # (K, K)
    classes = len(counts)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = min(max(3.0, 0.5 * classes), 12.0)  # inches of the matrix itself; names and titles come on top
    figure = Figure(figsize=(side, side))
    axes = figure.add_axes((0, 0, 1, 1))
    # The square root of the share, or the rare mistakes that one looks for would be white.
    scale = PowerNorm(0.5, vmin=0, vmax=1)
    picture = axes.imshow(shares, cmap="Blues", norm=scale, interpolation="nearest")
    bar = figure.add_axes((1.03, 0, 0.15 / side, 1))
    figure.colorbar(picture, cax=bar, label="share of the true class")
    axes.set(xlabel="predicted", ylabel="truth", title=f"top-1 {metrics['top1']:.3f}, {metrics['images']} images")
    if classes <= NAMED:
        _write_names(axes, list(metrics["per_class"]), size=9 if classes <= COUNTED else 7)
    else:
        axes.set(xticks=[], yticks=[], xlabel=f"predicted, {classes} classes")
    if classes <= COUNTED:
        for row, column in np.argwhere(counts):
            colour = "white" if scale(shares[row, column]) > 0.5 else "black"
            axes.text(column, row, str(counts[row, column]), ha="center", va="center", color=colour, fontsize=8)
    with warnings.catch_warnings():
        # A script that the font lacks is drawn as boxes: no reason to trouble whoever reads the log.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(path, format="png", dpi=150, bbox_inches="tight")


def _write_names(axes: Any, names: list[str], *, size: int) -> None:
    """Class names along both sides, cut where long; a ``$`` in them is no formula."""
    short = [name if len(name) <= 30 else f"{name[:29]}…" for name in names]
    places = range(len(names))
    axes.set_xticks(places, short, rotation=90, fontsize=size, parse_math=False)
    axes.set_yticks(places, short, fontsize=size, parse_math=False)
