"""Augmentations that make one training image of several.

Mosaic (arXiv 2004.10934) and mixup (arXiv 1710.09412) for detection, sample by sample in the workers; mixup and cutmix
(arXiv 1905.04899) for classification, a batch at a time on the device.
"""

from __future__ import annotations

import math

import cv2
import numpy as np
import torch
from torch import Tensor

from vitdet.data.transforms import Sample, check_probabilities, render
from vitdet.data.windows import Window
from vitdet.structures import ImageTargets

MIN_VISIBLE = 0.25  # a box that keeps less of its area is dropped: what is left is seldom recognisable
MIN_SIDE = 2.0  # pixels


def mosaic(samples: list[Sample], *, size: tuple[int, int], rng: np.random.Generator, fill: int = 0) -> Sample:
    """Four images around a random centre, each at a random scale between 0.4 and 1 of what it has alone.

    A quadrant shows a random part of its image where that is larger, else the whole image at the centre's corner.

    Args:
        samples: four of image (h, w, 3) uint8, boxes (T, 4) float32 ``xyxy`` pixels, labels (T,); sizes may differ.
        size: (height, width) of the result.
        fill: gray level where there is no image.

    Returns:
        Image (height, width, 3), boxes clipped to their quadrants, labels. Boxes that lose more than three quarters of
        their area or have a side under 2 pixels are dropped.
    """
    if len(samples) != 4:
        raise ValueError(f"a mosaic takes 4 samples, got {len(samples)}")
    height, width = size
    centre_x = min(max(round(width * rng.uniform(0.3, 0.7)), 1), width - 1)
    centre_y = min(max(round(height * rng.uniform(0.3, 0.7)), 1), height - 1)
    canvas = np.empty((height, width, 3), dtype=np.uint8)
    all_boxes, all_labels = [], []
    for position, (image, boxes, labels) in enumerate(samples):
        right, below = position % 2 == 1, position >= 2
        x0, x1 = (centre_x, width) if right else (0, centre_x)
        y0, y1 = (centre_y, height) if below else (0, centre_y)
        scale = rng.uniform(0.4, 1.0)
        window = _window(image.shape[:2], (y1 - y0, x1 - x0), size, scale, (right, below), rng)
        part, moved = render(image, boxes, window=window, size=(y1 - y0, x1 - x0), fill=fill)
        canvas[y0:y1, x0:x1] = part
        moved, keep = _clip(moved, (y1 - y0, x1 - x0))
        all_boxes.append(moved[keep] + np.array([x0, y0, x0, y0], dtype=np.float32))
        all_labels.append(labels[keep])
    return canvas, np.concatenate(all_boxes), np.concatenate(all_labels)


def mixup(first: Sample, second: Sample, rng: np.random.Generator) -> Sample:
    """Blend two images of equal size; the objects of both count fully. The weight is Beta(8, 8): 0.5 ± 0.12."""
    if first[0].shape != second[0].shape:
        raise ValueError(f"mixup takes images of equal size, got {first[0].shape} and {second[0].shape}")
    weight = float(rng.beta(8.0, 8.0))
    image = cv2.addWeighted(first[0], weight, second[0], 1.0 - weight, 0.0)
    return image, np.concatenate([first[1], second[1]]), np.concatenate([first[2], second[2]])


class BatchMixer:
    """Mixup and cutmix of a batch with itself in reverse order, one weight for the whole batch, as in DeiT's recipe.

    The randomness is torch's global generator on the CPU; nothing waits for the device.

    Args:
        mixup, cutmix: alpha of Beta(alpha, alpha), from which the weight of an image against its partner is drawn; 0
            turns the one off.
        switch: probability of cutmix where both are on.
        probability: of mixing a batch at all.
    """

    def __init__(
        self, *, mixup: float = 0.0, cutmix: float = 0.0, switch: float = 0.5, probability: float = 1.0
    ) -> None:
        check_probabilities(switch=switch, probability=probability)
        if mixup < 0 or cutmix < 0:
            raise ValueError(f"mixup and cutmix are the alphas of beta distributions, >= 0, got {mixup} and {cutmix}")
        self.mixup = mixup
        self.cutmix = cutmix
        self.switch = switch
        self.probability = probability

    def __call__(self, images: Tensor, targets: ImageTargets) -> tuple[Tensor, ImageTargets]:
        """Mix a batch.

        Args:
            images: (B, 3, h, w) float, normalised; it is written to.
            targets: without a teacher's classes, which are those of the mixed images.

        Returns:
            The images, same memory, and the new targets: each row the partners' rows weighted by their pixels.
        """
        if targets.teacher is not None:
            raise ValueError("mix the batch before the teacher sees it: its classes must be those of the mixed images")
        if not (self.mixup or self.cutmix) or _uniform() >= self.probability:
            return images, targets
        use_cutmix = self.cutmix > 0 and (not self.mixup or _uniform() < self.switch)
        alpha = self.cutmix if use_cutmix else self.mixup
        share = float(torch.distributions.Beta(alpha, alpha).sample())  # of the image itself
        if use_cutmix:
            top, bottom, left, right = _cut(images.shape[-2:], share)
            box = images[:, :, top:bottom, left:right]
            box.copy_(box.flip(0))
            share = 1.0 - (bottom - top) * (right - left) / (images.shape[-2] * images.shape[-1])
        else:
            images.lerp_(images.flip(0), 1.0 - share)
        rows = targets.probabilities
        return images, ImageTargets(rows.lerp(rows.flip(0), 1.0 - share))


def _uniform() -> float:
    """A random number in [0, 1) from torch's global generator on the CPU."""
    return float(torch.rand(()))


def _cut(size: tuple[int, int] | torch.Size, share: float) -> tuple[int, int, int, int]:
    """Top, bottom, left, right of a box around a random pixel, of the image's proportions, ``1 - share`` of its area.

    What lies outside the image is lost, so the box may be smaller.
    """
    spans: list[int] = []
    for length in size:
        side = int(length * math.sqrt(1.0 - share))
        centre = int(_uniform() * length)
        spans += [max(centre - side // 2, 0), min(centre + (side + 1) // 2, length)]
    top, bottom, left, right = spans
    return top, bottom, left, right


def _window(
    image_size: tuple[int, int],
    tile_size: tuple[int, int],
    size: tuple[int, int],
    scale: float,
    corner: tuple[bool, bool],
    rng: np.random.Generator,
) -> Window:
    """The part of the image that a tile shows, per axis, when the whole image spans ``scale`` of the canvas."""
    spans = []
    for axis, at_end in ((1, corner[0]), (0, corner[1])):
        length = max(round(tile_size[axis] * image_size[axis] / (size[axis] * scale)), 1)
        spare = image_size[axis] - length
        beside_centre = 0 if at_end else spare  # where the image is smaller than its tile
        low = round(spare * rng.random()) if spare >= 0 else beside_centre
        spans.append((low, low + length))
    (x0, x1), (y0, y1) = spans
    return x0, y0, x1, y1


def _clip(boxes: np.ndarray, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Boxes clipped to (height, width), and which of them keep enough: (T, 4), (T,) bool."""
    height, width = size
    clipped = np.clip(boxes, 0.0, np.array([width, height, width, height], dtype=np.float32))
    sides = clipped[:, 2:] - clipped[:, :2]
    whole = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    return clipped, (sides >= MIN_SIDE).all(axis=1) & (sides.prod(axis=1) >= MIN_VISIBLE * whole)
