"""What happens to one image on its way to the model: RT-DETR's augmentation, and the resize shared by all paths.

The published order is photometric distortion, zoom-out, IoU crop, flips, resize. Here the geometry is decided first, as
one window over the image, and pixels are touched once: the part of the image inside the window is resized straight to
its place, and the colours are distorted there. What differs is rounding; what is saved is filling a canvas of 16 times
the image, and distorting pixels that the crop discards. Boxes are (T, 4) float32 ``xyxy`` pixels.
Source: RT-DETR (arXiv 2304.08069), its training recipe.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import cv2
import numpy as np
import torch
from PIL import Image

from vitdet.data import windows
from vitdet.data.windows import Window
from vitdet.structures import Preprocessing

Sample = tuple[np.ndarray, np.ndarray, np.ndarray]  # image (h, w, 3) uint8, boxes (T, 4) float32, labels (T,) int64


class Transform(Protocol):
    """The signature shared by training and evaluation."""

    def __call__(
        self,
        image: np.ndarray,
        boxes: np.ndarray,
        labels: np.ndarray,
        *,
        size: tuple[int, int],
        rng: np.random.Generator,
        strong: bool = True,
        composed: bool = False,
    ) -> Sample:
        """See :meth:`TrainTransform.__call__`."""
        ...


class EvalTransform:
    """Resize, and nothing else.

    ``size`` (height, width) is reached by stretching, as most published models expect; with ``longest`` the proportions
    are kept, see :func:`proportional`. ``interpolation``: see :func:`resize`.
    """

    def __init__(self, *, longest: int | None = None, interpolation: str = "bilinear") -> None:
        self.longest, self.interpolation = longest, interpolation

    def __call__(
        self,
        image: np.ndarray,
        boxes: np.ndarray,
        labels: np.ndarray,
        *,
        size: tuple[int, int],
        rng: np.random.Generator | None = None,
        strong: bool = False,
        composed: bool = False,
    ) -> Sample:
        """The resized image and its boxes; the last three arguments belong to the shared signature."""
        del rng, strong, composed
        if self.longest is not None:
            size = proportional((image.shape[0], image.shape[1]), shorter=size[0], longest=self.longest)
        scale = np.array([size[1] / image.shape[1], size[0] / image.shape[0]] * 2, dtype=np.float32)
        return resize(image, size, interpolation=self.interpolation, exact=True), boxes * scale, labels


class TrainTransform:
    """Augmentation of one image, with all its randomness from the generator given to the call.

    Args:
        photometric: probability of distorting the colours; brightness, contrast, saturation, hue and order of the
            channels are then each changed with probability 0.5.
        zoom_out: probability of placing the image on a canvas up to 4 times its size.
        iou_crop: probability of SSD's crop, which keeps the boxes whose centres it contains.
        hflip, vflip: probabilities of flipping.
        rotate90: probability of turning by 90, 180 or 270 degrees.
        scale_jitter: range of the factor by which the image grows (above 1: a random part of it is shown) or shrinks
            (below 1: it is placed on a canvas); log-uniform.
        size_crop: probability of DETR's crop: a part as large as it would be of an image of usual size, which keeps
            all boxes that reach into it.
        longest: keep the proportions, see :func:`proportional`; the sizes of the results then differ.
        shorter: the shorter sides that each image draws one of, with ``longest``; that of ``size`` where none is given.
        min_box_pixels: boxes with a side below this, in pixels of the crop or of the result, are dropped.
        fill: gray level of the canvas.
    """

    def __init__(
        self,
        *,
        photometric: float = 0.0,
        zoom_out: float = 0.0,
        iou_crop: float = 0.0,
        hflip: float = 0.0,
        vflip: float = 0.0,
        rotate90: float = 0.0,
        scale_jitter: tuple[float, float] = (1.0, 1.0),
        size_crop: float = 0.0,
        longest: int | None = None,
        shorter: Sequence[int] = (),
        min_box_pixels: float = 1.0,
        fill: int = 0,
    ) -> None:
        check_probabilities(
            photometric=photometric, zoom_out=zoom_out, iou_crop=iou_crop, hflip=hflip, vflip=vflip, rotate90=rotate90,
            size_crop=size_crop,
        )  # fmt: skip
        if not 0 < scale_jitter[0] <= scale_jitter[1]:
            raise ValueError(f"scale_jitter is a range (low, high) of positive factors, got {scale_jitter}")
        self.photometric = photometric
        self.zoom_out = zoom_out
        self.iou_crop = iou_crop
        self.hflip = hflip
        self.vflip = vflip
        self.rotate90 = rotate90
        self.scale_jitter = scale_jitter
        self.size_crop = size_crop
        self.longest = longest
        self.shorter = tuple(shorter)
        self.min_box_pixels = min_box_pixels
        self.fill = fill
        self._colours = _colour_transforms() if photometric else []

    def __call__(
        self,
        image: np.ndarray,
        boxes: np.ndarray,
        labels: np.ndarray,
        *,
        size: tuple[int, int],
        rng: np.random.Generator,
        strong: bool = True,
        composed: bool = False,
    ) -> Sample:
        """Augment one sample.

        Args:
            image: (h, w, 3) uint8 RGB; it is not written to.
            boxes: (T, 4) ``xyxy`` pixels within the image.
            labels: (T,).
            size: (height, width) of the result; with ``longest`` its shorter side, where ``shorter`` says no other.
            rng: the only source of randomness.
            strong: False leaves out photometric distortion, zoom-out, both crops and the other shorter sides (the last
                epochs of a recipe).
            composed: True for a mosaic, which has its own scale and crops: no second zoom-out, crop or scale jitter.

        Returns:
            The image (height, width, 3) uint8, and the T' <= T boxes (float32) and labels that are left.
        """
        height, width = image.shape[:2]
        window: Window = (0, 0, width, height)
        if not composed:
            if strong and rng.random() < self.zoom_out:
                window = windows.zoom_out(window, rng)
            if strong and rng.random() < self.iou_crop:
                window = windows.iou_crop(window, boxes, rng)
            if self.scale_jitter != (1.0, 1.0):
                window = windows.rescale(window, self.scale_jitter, rng)
            sized = strong and self.size_crop > 0 and rng.random() < self.size_crop
            if sized:
                window = windows.size_crop(window, rng)
            boxes, labels = windows.boxes_inside(boxes, labels, window, self.min_box_pixels, centred=not sized)
        distort = strong and rng.random() < self.photometric
        turns = int(rng.integers(1, 4)) if rng.random() < self.rotate90 else 0
        upright = self._upright(window, size, turns, rng if strong else None)
        recolour = (lambda pixels: _distort(pixels, self._colours, rng)) if distort else None
        image, boxes = render(image, boxes, window=window, size=upright, fill=self.fill, recolour=recolour)
        image, boxes = _rotate90(image, boxes, turns)
        image, boxes = _flip(image, boxes, across=rng.random() < self.hflip, down=rng.random() < self.vflip)
        height, width = image.shape[:2]
        boxes = np.clip(boxes, 0, np.array([width, height] * 2, dtype=np.float32))  # rounding may exceed by 1e-5
        keep = windows.large_boxes(boxes, self.min_box_pixels)
        return image, boxes[keep], labels[keep]

    def _upright(
        self, window: Window, size: tuple[int, int], turns: int, rng: np.random.Generator | None
    ) -> tuple[int, int]:
        """(height, width) at which the window is shown before it is turned; without ``rng`` nothing is drawn."""
        if self.longest is None:
            return size if turns % 2 == 0 else (size[1], size[0])
        shorter = self.shorter[rng.integers(len(self.shorter))] if self.shorter and rng is not None else size[0]
        return proportional((window[3] - window[1], window[2] - window[0]), shorter=shorter, longest=self.longest)


def check_probabilities(**probabilities: float) -> None:
    """Raise a ValueError that names the first one outside [0, 1]."""
    for name, value in probabilities.items():
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is a probability, got {value}")


PILLOW = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def resize(
    image: np.ndarray, size: tuple[int, int], *, interpolation: str = "bilinear", exact: bool = False
) -> np.ndarray:
    """Stretch to ``size`` (height, width), with antialiasing where it shrinks.

    Pillow's ``Image.resize`` where ``exact``: the published models were measured with it, and one gray level in 3 % of
    the values moves the AP of a small set by 0.001. Else, for training, equal to it to one gray level. Of what holds
    that, torch's kernel is the fastest (640 x 480 to 320 x 256, bilinear: 0.5 ms, Pillow 1.7 ms; 500 x 375 to
    224 x 224, bicubic: 0.5 and 1.6 ms); OpenCV's linear and cubic modes have no antialiasing, its area mode is another
    filter. Rows are done before columns, as in all of Pillow up to its newest, which turns that round where the height
    shrinks and the width grows: there bicubic overshoots are clipped at different times, and may differ by more.

    Args:
        image: (h, w, 3) uint8.
        interpolation: ``"bilinear"`` or ``"bicubic"``. exact: see above.

    Returns:
        (height, width, 3) uint8, contiguous; the input itself where it already has the size.
    """
    if image.shape[:2] == tuple(size):
        return image
    if exact:
        return np.array(Image.fromarray(image).resize((size[1], size[0]), PILLOW[interpolation]))
    pixels = np.ascontiguousarray(image)
    if not pixels.flags.writeable:
        pixels = pixels.copy()  # torch warns of memory that it must not write to
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None]  # (1, 3, h, w), channels last
    planes = torch.nn.functional.interpolate(planes, size=tuple(size), mode=interpolation, antialias=True)[0]
    return cv2.merge(list(planes.contiguous().numpy()))


def proportional(size: tuple[int, int], *, shorter: int, longest: int) -> tuple[int, int]:
    """The (height, width) with these proportions whose shorter side is ``shorter``, or less.

    It is less where the longer side would exceed ``longest``. The roundings are those of DETR's own code (half to even
    for the shorter side, down for the longer).
    """
    low, high = min(size), max(size)
    if high / low * shorter > longest:
        shorter = round(longest * low / high)
    if low == shorter:
        return size
    longer, shorter = (int(shorter * high / low), shorter) if shorter else (longest, 1)
    return (shorter, longer) if size[0] <= size[1] else (longer, shorter)


def to_input(image: np.ndarray, preprocessing: Preprocessing) -> np.ndarray:
    """An image (h, w, 3) uint8 with the geometry that a model takes: (height, width, 3) uint8, contiguous."""
    size, crop, interpolation = preprocessing.size, preprocessing.crop, preprocessing.interpolation
    if preprocessing.longest is not None:
        size = proportional((image.shape[0], image.shape[1]), shorter=size[0], longest=preprocessing.longest)
    if crop is None:
        return resize(image, size, interpolation=interpolation, exact=True)
    return centre_crop(image, size, share=crop, interpolation=interpolation, exact=True)


def centre_crop(
    image: np.ndarray, size: tuple[int, int], *, share: float, interpolation: str, exact: bool = False
) -> np.ndarray:
    """Resize until the image just covers ``size / share``, its proportions kept, and cut out the middle ``size``.

    The roundings are those of torchvision's ``Resize`` and ``CenterCrop``, and of timm's evaluation for square sizes:
    equal to both, on Pillow images.

    Args:
        image: (h, w, 3) uint8, of any size.
        size: (height, width) of the result.
        share: in (0, 1], the share of the resized image's shorter side that is kept.
        interpolation: ``"bilinear"`` or ``"bicubic"``. exact: see :func:`resize`.
    """
    image = _middle(image, size)
    height, width = image.shape[:2]
    # 224 / (224 / 256) is a hair below 256.
    cover_h, cover_w = (math.floor(side / share + 1e-6) for side in size)
    if cover_h * width >= cover_w * height:
        new_h, new_w = cover_h, max(int(cover_h * width / height), cover_w)
    else:
        new_h, new_w = max(int(cover_w * height / width), cover_h), cover_w
    image = resize(image, (new_h, new_w), interpolation=interpolation, exact=exact)
    top, left = round((new_h - size[0]) / 2), round((new_w - size[1]) / 2)
    return np.ascontiguousarray(image[top : top + size[0], left : left + size[1]])


def _middle(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The middle of a very long image, so that resizing does not take memory for thousands of times what is kept.

    It keeps 32 times the proportions of the result. An even number of pixels goes, so that the centre stays.
    """
    height, width = image.shape[:2]
    spare_h = (height - max(-(-32 * width * size[0] // size[1]), 1)) // 2
    spare_w = (width - max(-(-32 * height * size[1] // size[0]), 1)) // 2
    if spare_h > 0:
        return image[spare_h : height - spare_h]
    return image[:, spare_w : width - spare_w] if spare_w > 0 else image


def render(
    image: np.ndarray,
    boxes: np.ndarray,
    *,
    window: Window,
    size: tuple[int, int],
    fill: int = 0,
    recolour: Callable[[np.ndarray], np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Show a window of the image at ``size`` (height, width); beyond the image there is ``fill``.

    Boxes (T, 4) follow, unclipped. ``recolour`` is applied to the pixels of the image, not to the fill.
    """
    height, width = image.shape[:2]
    x0, y0, x1, y1 = window
    scale_x, scale_y = size[1] / (x1 - x0), size[0] / (y1 - y0)
    left, top, right, bottom = max(x0, 0), max(y0, 0), min(x1, width), min(y1, height)
    if right <= left or bottom <= top:
        return np.full((*size, 3), fill, dtype=np.uint8), boxes[:0]
    # The place of the image in the result, in whole pixels; the boxes use the same rounded mapping as the pixels.
    to_x0, to_x1 = _place(left - x0, right - x0, scale_x, size[1])
    to_y0, to_y1 = _place(top - y0, bottom - y0, scale_y, size[0])
    part = resize(image[top:bottom, left:right], (to_y1 - to_y0, to_x1 - to_x0))
    if recolour is not None:
        part = recolour(part)
    factor = np.array([(to_x1 - to_x0) / (right - left), (to_y1 - to_y0) / (bottom - top)] * 2, dtype=np.float32)
    moved = (boxes - np.array([left, top] * 2, dtype=np.float32)) * factor
    moved = (moved + np.array([to_x0, to_y0] * 2, dtype=np.float32)).astype(np.float32)
    if part.shape[:2] == tuple(size):
        return np.ascontiguousarray(part), moved
    canvas = np.full((*size, 3), fill, dtype=np.uint8)
    canvas[to_y0:to_y1, to_x0:to_x1] = part
    return canvas, moved


def _place(low: int, high: int, scale: float, most: int) -> tuple[int, int]:
    """An interval scaled and rounded, at least one pixel long and within 0…most."""
    first = min(round(low * scale), most - 1)
    return first, min(max(round(high * scale), first + 1), most)


def _rotate90(image: np.ndarray, boxes: np.ndarray, turns: int) -> tuple[np.ndarray, np.ndarray]:
    """Turn image and boxes counter-clockwise by quarters."""
    for _ in range(turns):
        width = image.shape[1]
        image = cv2.rotate(image, cv2.ROTATE_90_COUNTERCLOCKWISE)
        x0, y0, x1, y1 = boxes.T
        boxes = np.stack([y0, width - x1, y1, width - x0], axis=1)
    return image, boxes


def _flip(image: np.ndarray, boxes: np.ndarray, *, across: bool, down: bool) -> tuple[np.ndarray, np.ndarray]:
    """Mirror left-right (``across``) and top-bottom (``down``)."""
    height, width = image.shape[:2]
    if across:
        image, boxes = cv2.flip(image, 1), boxes.copy()
        boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
    if down:
        image, boxes = cv2.flip(image, 0), boxes.copy()
        boxes[:, [1, 3]] = height - boxes[:, [3, 1]]
    return image, boxes


def _colour_transforms() -> list[Any]:
    """The five steps of RT-DETR's photometric distortion."""
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # or the import asks the network for a newer version
    import albumentations as A

    none = {"brightness": (1.0, 1.0), "contrast": (1.0, 1.0), "saturation": (1.0, 1.0), "hue": (0.0, 0.0)}
    ranges = {"brightness": (0.875, 1.125), "contrast": (0.5, 1.5), "saturation": (0.5, 1.5), "hue": (-0.05, 0.05)}
    return [*(A.ColorJitter(**{**none, name: limits}, p=1) for name, limits in ranges.items()), A.ChannelShuffle(p=1)]


def _distort(image: np.ndarray, steps: list[Any], rng: np.random.Generator) -> np.ndarray:
    """Each step with probability 0.5, and with its own seed: a ``Compose`` would give all of them the same draws."""
    for step in steps:
        if rng.random() < 0.5:
            step.set_random_seed(int(rng.integers(2**31)))
            image = step(image=image)["image"]
    return image
