"""RandAugment (arXiv 1909.13719) on uint8 arrays: the 15 operations whose strength grows with the magnitude.

The operations, their ranges and the probability of one half for each are those of timm's ``rand-mM-mstdS-inc1``, with
which DeiT and most ViT recipes were trained. Each operation equals Pillow's to a few gray levels, and takes a fraction
of its time: whatever maps a gray level to a gray level is one table look-up. Two things differ from timm: warps are
always bilinear, and posterizing keeps at least one bit, for a black image teaches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import cv2
import numpy as np

FILL = (128, 128, 128)  # beyond the image
LEVELS = np.arange(256, dtype=np.float32)
LUMA = np.array([0.299, 0.587, 0.114])
MAX_MAGNITUDE = 10.0


class RandAugment:
    """``layers`` operations, each drawn from all 15 and applied with probability 0.5.

    Args:
        layers: how many operations are drawn.
        magnitude: mean strength, 0…10.
        std: standard deviation of the strength of an operation; results are clipped to 0…10.
    """

    def __init__(self, *, layers: int, magnitude: float, std: float) -> None:
        if layers < 0 or not 0 <= magnitude <= MAX_MAGNITUDE or std < 0:
            raise ValueError(
                f"RandAugment takes layers >= 0, a magnitude in 0…10 and a std >= 0, got {layers}, {magnitude}, {std}"
            )
        self.layers = layers
        self.magnitude = magnitude
        self.std = std

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The augmented image (h, w, 3) uint8; the input itself where nothing was drawn."""
        draws = rng.random((self.layers, 3)).tolist()
        strengths = rng.normal(self.magnitude, self.std, self.layers).tolist()
        for (choice, apply, sign), strength in zip(draws, strengths, strict=True):
            if apply < 0.5:
                operation = _ALL[int(choice * len(_ALL))]
                level = min(max(strength, 0.0), MAX_MAGNITUDE) / MAX_MAGNITUDE
                image = operation(image, level, 1.0 if sign < 0.5 else -1.0)
        return image


# --- look-ups: each gray level to another, whatever the place


def autocontrast(image: np.ndarray) -> np.ndarray:
    """Stretch each channel to 0…255."""
    low = image.min(axis=0).min(axis=0).astype(np.float64)  # (3,); axis by axis is five times faster than at once
    high = image.max(axis=0).max(axis=0).astype(np.float64)
    flat = high <= low
    scale = np.where(flat, 1.0, 255.0 / np.where(flat, 1.0, high - low))
    table = LEVELS[:, None] * scale - np.where(flat, 0.0, low) * scale  # (256, 3)
    return cv2.LUT(image, _to_bytes(table)[None])


def equalize(image: np.ndarray) -> np.ndarray:
    """Spread each channel so that all levels are equally frequent."""
    tables = np.empty((1, 256, 3), dtype=np.uint8)
    for channel in range(3):
        counts = cv2.calcHist([image], [channel], None, [256], [0, 256]).reshape(256).astype(np.int64)
        used = np.flatnonzero(counts)
        step = int(counts.sum() - counts[used[-1]]) // 255
        if len(used) <= 1 or step == 0:
            tables[0, :, channel] = LEVELS
            continue
        below = np.cumsum(counts) - counts
        tables[0, :, channel] = np.minimum((below + step // 2) // step, 255)
    return cv2.LUT(image, tables)


def invert(image: np.ndarray) -> np.ndarray:
    """The negative."""
    return cv2.bitwise_not(image)


def posterize(image: np.ndarray, bits: int) -> np.ndarray:
    """Keep the highest 1…8 bits."""
    return image & np.uint8(256 - (1 << (8 - bits)))


def solarize(image: np.ndarray, threshold: int) -> np.ndarray:
    """Invert the levels from ``threshold`` on."""
    return cv2.LUT(image, np.where(threshold > LEVELS, LEVELS, 255 - LEVELS).astype(np.uint8))


def solarize_add(image: np.ndarray, amount: int) -> np.ndarray:
    """Lighten the dark half by ``amount`` levels."""
    return cv2.LUT(image, _to_bytes(np.where(LEVELS < 128, LEVELS + amount, LEVELS)))


def brightness(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with black: 0 is black, 1 the image."""
    return cv2.LUT(image, _to_bytes(LEVELS * factor))


def contrast(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the mean gray: 0 is gray, 1 the image."""
    mean = int(LUMA @ np.array(cv2.mean(image)[:3]) + 0.5)
    return cv2.LUT(image, _to_bytes(mean + (LEVELS - mean) * factor))


# --- blends with a changed image


def saturation(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the grayscale image: 0 is gray, 1 the image."""
    gray = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    return cv2.addWeighted(image, factor, gray, 1.0 - factor, 0.0)


def sharpness(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the image smoothed by (1 1 1, 1 5 1, 1 1 1) / 13; the outermost pixels stay as they are."""
    mean = cv2.blur(image, (3, 3))  # of all nine; with four ninths of the middle more it is the smoothed image
    result = cv2.addWeighted(mean, (1.0 - factor) * 9 / 13, image, factor + (1.0 - factor) * 4 / 13, 0.0)
    result[[0, -1]], result[:, [0, -1]] = image[[0, -1]], image[:, [0, -1]]
    return result


def gaussian_blur(image: np.ndarray, sigma: float) -> np.ndarray:
    """Smooth by a Gaussian of ``sigma`` pixels."""
    return cv2.GaussianBlur(image, (0, 0), sigma, borderType=cv2.BORDER_REPLICATE)


# --- geometry


def affine(image: np.ndarray, matrix: tuple[float, float, float, float, float, float]) -> np.ndarray:
    """Pixel (x, y) shows what is at (a x + b y + c, d x + e y + f), corners counted as Pillow does; bilinear."""
    a, b, c, d, e, f = matrix
    # Pillow's coordinates have the middle of the first pixel at (0.5, 0.5), OpenCV's at (0, 0).
    moved = np.array([[a, b, c + (a + b - 1) / 2], [d, e, f + (d + e - 1) / 2]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    padded = cv2.cvtColor(image, cv2.COLOR_RGB2RGBA)  # four channels are warped twice as fast as three
    padded = cv2.warpAffine(padded, moved, image.shape[1::-1], flags=flags, borderValue=FILL)
    return cv2.cvtColor(padded, cv2.COLOR_RGBA2RGB)


def rotate(image: np.ndarray, degrees: float) -> np.ndarray:
    """Turn counter-clockwise around the middle."""
    height, width = image.shape[:2]
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    x, y = width / 2, height / 2
    return affine(image, (cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y))


def _to_bytes(levels: np.ndarray) -> np.ndarray:
    """Clipped to 0…255, fractions cut off as Pillow does."""
    return np.clip(levels, 0, 255).astype(np.uint8)


def _factor(level: float, sign: float) -> float:
    """The weight of a blend: 1 changes nothing, 0.1 and 1.9 most."""
    return max(0.1, 1.0 + sign * 0.9 * level)


# Each takes the image, the strength in [0, 1] and a random sign.
OPERATIONS: dict[str, Callable[[np.ndarray, float, float], np.ndarray]] = {
    "AutoContrast": lambda image, level, sign: autocontrast(image),
    "Equalize": lambda image, level, sign: equalize(image),
    "Invert": lambda image, level, sign: invert(image),
    "Rotate": lambda image, level, sign: rotate(image, sign * 30 * level),
    "Posterize": lambda image, level, sign: posterize(image, max(4 - int(4 * level), 1)),
    "Solarize": lambda image, level, sign: solarize(image, 256 - int(256 * level)),
    "SolarizeAdd": lambda image, level, sign: solarize_add(image, int(110 * level)),
    "Color": lambda image, level, sign: saturation(image, _factor(level, sign)),
    "Contrast": lambda image, level, sign: contrast(image, _factor(level, sign)),
    "Brightness": lambda image, level, sign: brightness(image, _factor(level, sign)),
    "Sharpness": lambda image, level, sign: sharpness(image, _factor(level, sign)),
    "ShearX": lambda image, level, sign: affine(image, (1, sign * 0.3 * level, 0, 0, 1, 0)),
    "ShearY": lambda image, level, sign: affine(image, (1, 0, 0, sign * 0.3 * level, 1, 0)),
    "TranslateX": lambda image, level, sign: affine(image, (1, 0, sign * 0.45 * level * image.shape[1], 0, 1, 0)),
    "TranslateY": lambda image, level, sign: affine(image, (1, 0, 0, 0, 1, sign * 0.45 * level * image.shape[0])),
}
_ALL = tuple(OPERATIONS.values())
