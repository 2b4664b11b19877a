"""What happens to an image on its way to a classifier: random crop and flip, colours, RandAugment, random erasing.

The order is that of timm and DeiT. All steps work on uint8 arrays of the size that the model takes. Sources: random
resized crop, arXiv 1409.4842; RandAugment, 1909.13719; three-augment, DeiT III, 2204.07118; random erasing, 1708.04896.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import cv2
import numpy as np

from vitdet.data.randaugment import RandAugment, brightness, contrast, gaussian_blur, saturation, solarize
from vitdet.data.transforms import centre_crop, check_probabilities, resize, to_input
from vitdet.structures import IMAGENET_MEAN, IMAGENET_STD, Preprocessing

CROP_TRIALS = 10
ERASED_AREA = (0.02, 1 / 3)  # share of the image
ERASED_RATIO = (0.3, 1 / 0.3)  # height over width
BLUR_SIGMA = (0.1, 2.0)  # pixels, of the three-augment's blur


class ClassificationTransform:
    """Augmentation of one image, with all its randomness from the generator given to the call.

    Args:
        scale: share of the image's area that a random crop keeps.
        ratio: width over height of a random crop, log-uniform.
        hflip: probability of mirroring left-right.
        interpolation: ``"bilinear"`` or ``"bicubic"``.
        rand_augment_layers: operations of RandAugment drawn for an image, 2 in most recipes; 0 for none.
        rand_augment_magnitude: their mean strength, 0…10.
        rand_augment_std: its standard deviation.
        three_augment: one of grayscale, solarize and blur for each image, as DeiT III does instead of RandAugment.
        colour_jitter: c changes brightness, contrast and saturation each by a factor in [1 - c, 1 + c].
        erasing: probability of replacing a random rectangle by noise.
        resize_only: no random crop: the middle of the resized image, as in evaluation with ``crop=1``.
    """

    def __init__(
        self,
        *,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        hflip: float = 0.5,
        interpolation: str = "bicubic",
        rand_augment_layers: int = 0,
        rand_augment_magnitude: float = 9.0,
        rand_augment_std: float = 0.5,
        three_augment: bool = False,
        colour_jitter: float = 0.0,
        erasing: float = 0.0,
        resize_only: bool = False,
    ) -> None:
        check_probabilities(hflip=hflip, erasing=erasing)
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError(f"scale is a range (low, high) of shares in (0, 1], got {scale}")
        if not 0 < ratio[0] <= ratio[1]:
            raise ValueError(f"ratio is a range (low, high) of positive ratios, got {ratio}")
        if not 0 <= colour_jitter <= 1:
            raise ValueError(f"colour_jitter must be in [0, 1], got {colour_jitter}")
        if interpolation not in ("bilinear", "bicubic"):
            raise ValueError(f"interpolation must be 'bilinear' or 'bicubic', got {interpolation!r}")
        self.scale = scale
        self.ratio = ratio
        self.hflip = hflip
        self.interpolation = interpolation
        self.rand_augment = RandAugment(
            layers=rand_augment_layers, magnitude=rand_augment_magnitude, std=rand_augment_std
        )
        self.three_augment = three_augment
        self.colour_jitter = colour_jitter
        self.erasing = erasing
        self.resize_only = resize_only

    def __call__(
        self, image: np.ndarray, *, size: tuple[int, int], rng: np.random.Generator, strong: bool = True
    ) -> np.ndarray:
        """Augment one image.

        Args:
            image: (h, w, 3) uint8 RGB; it is not written to.
            size: (height, width) of the result.
            rng: the only source of randomness.
            strong: False keeps only the crop and the flip.

        Returns:
            (height, width, 3) uint8, contiguous; it may be the input itself.
        """
        if self.resize_only:
            image = centre_crop(image, size, share=1.0, interpolation=self.interpolation)
        else:
            top, left, height, width = random_crop(image.shape[:2], scale=self.scale, ratio=self.ratio, rng=rng)
            image = image[top : top + height, left : left + width]
            image = np.ascontiguousarray(resize(image, size, interpolation=self.interpolation))
        if rng.random() < self.hflip:
            image = cv2.flip(image, 1)
        if not strong:
            return image
        if self.three_augment:
            image = _three_augment(image, rng)
        if self.rand_augment.layers:
            image = self.rand_augment(image, rng)
        if self.colour_jitter:
            image = _colour_jitter(image, self.colour_jitter, rng)
        return erase(image, rng) if rng.random() < self.erasing else image


class ClassificationEvalTransform:
    """The geometry in which a model is evaluated, and nothing else; see :func:`vitdet.data.transforms.to_input`."""

    def __init__(self, preprocessing: Preprocessing) -> None:
        self.preprocessing = preprocessing

    def __call__(
        self,
        image: np.ndarray,
        *,
        size: tuple[int, int],
        rng: np.random.Generator | None = None,
        strong: bool = False,
    ) -> np.ndarray:
        """The image as the model takes it, (height, width, 3); the last two arguments belong to the shared signature.

        Raises:
            ValueError: ``size`` is not that of the preprocessing.
        """
        del rng, strong
        if tuple(size) != tuple(self.preprocessing.size):
            raise ValueError(f"the preprocessing gives images of {self.preprocessing.size}, asked for {tuple(size)}")
        return to_input(image, self.preprocessing)


def random_crop(
    image_size: tuple[int, int],
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    rng: np.random.Generator,
) -> tuple[int, int, int, int]:
    """A part of an image with a random share of its area, a random ratio and a random place.

    Where ten draws do not fit into the image, the largest part in the middle whose ratio is allowed.

    Args:
        image_size: (height, width).
        scale: range of the share. ratio: range of width over height, drawn log-uniformly.

    Returns:
        top, left, height, width in pixels.
    """
    height, width = image_size
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for share, shape, y, x in rng.random((CROP_TRIALS, 4)).tolist():
        area = height * width * (scale[0] + (scale[1] - scale[0]) * share)
        aspect = math.exp(low + (high - low) * shape)
        crop_w, crop_h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < crop_w <= width and 0 < crop_h <= height:
            return int(y * (height - crop_h + 1)), int(x * (width - crop_w + 1)), crop_h, crop_w
    crop_w = min(width, max(round(height * ratio[1]), 1))
    crop_h = min(height, max(round(width / ratio[0]), 1))
    return (height - crop_h) // 2, (width - crop_w) // 2, crop_h, crop_w


def erase(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A copy with one random rectangle replaced by noise, a colour for each pixel.

    The noise is normal around the mean of ImageNet's colours, so that it is N(0, 1) once the model's input is
    normalised. Where ten draws of a rectangle do not fit, nothing is erased.
    """
    height, width = image.shape[:2]
    low, high = math.log(ERASED_RATIO[0]), math.log(ERASED_RATIO[1])
    for share, shape, y, x in rng.random((CROP_TRIALS, 4)).tolist():
        area = height * width * (ERASED_AREA[0] + (ERASED_AREA[1] - ERASED_AREA[0]) * share)
        aspect = math.exp(low + (high - low) * shape)
        part_h, part_w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < part_h < height and 0 < part_w < width:
            top, left = int(y * (height - part_h + 1)), int(x * (width - part_w + 1))
            image = image.copy()
            # Random bytes looked up in the normal's quantiles: a tenth of the time that drawing normals takes.
            noise = np.frombuffer(rng.bytes(part_h * part_w * 3), dtype=np.uint8).reshape(part_h, part_w, 3)
            image[top : top + part_h, left : left + part_w] = cv2.LUT(noise, _NOISE)
            return image
    return image


def _noise_table() -> np.ndarray:
    """(1, 256, 3): the 256 quantiles of each channel's normal distribution, as gray levels."""
    normal = np.array([NormalDist().inv_cdf((level + 0.5) / 256) for level in range(256)])[:, None]
    mean, std = np.array(IMAGENET_MEAN), np.array(IMAGENET_STD)
    return np.clip(np.rint((mean + normal * std) * 255), 0, 255).astype(np.uint8)[None]


_NOISE = _noise_table()


def _three_augment(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Grayscale, solarize or blur, each with probability 1/3."""
    choice, strength = rng.random(2).tolist()
    if choice < 1 / 3:
        return saturation(image, 0.0)
    if choice < 2 / 3:
        return solarize(image, 128)
    return gaussian_blur(image, BLUR_SIGMA[0] + (BLUR_SIGMA[1] - BLUR_SIGMA[0]) * strength)


def _colour_jitter(image: np.ndarray, amount: float, rng: np.random.Generator) -> np.ndarray:
    """Brightness, contrast and saturation in random order, each by its own random factor."""
    steps = (brightness, contrast, saturation)
    factors = rng.uniform(1 - amount, 1 + amount, size=3).tolist()
    for number in rng.permutation(3).tolist():
        image = steps[number](image, factors[number])
    return image
